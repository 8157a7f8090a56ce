"""The arguments of a capture: whether sizes are left to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import Dim

from quantc.capture.capture_request import AUTO, Request


@pytest.mark.parametrize(
    ("shapes", "is_auto"),
    [
        (AUTO, True),
        ("auto", True),
        (None, False),
        ({"x": {0: Dim.AUTO}}, False),
        (({0: "auto"},), False),
        ("none", False),
    ],
)
def test_only_the_word_leaves_sizes_to_capture(shapes: Any, is_auto: bool) -> None:
    assert Request((torch.ones(2),), {}, shapes, ()).is_auto is is_auto
