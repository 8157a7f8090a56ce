"""The linear layer that finds the scale of what it reads as it runs."""

from __future__ import annotations

import pytest
import torch

from tests.support.dynamic_cases import pair_of
from tests.support.nn_cases import engine


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
def test_what_is_not_finite_shows(engine_name: str, value: float) -> None:
    """torch.ao's kernels take it for some number."""
    with engine(engine_name):
        ours, _, _ = pair_of("Linear", "int8")
        x = torch.randn(5, 24)
        assert ours(x).isfinite().all()
        x[2, 3] = value
        assert not ours(x).isfinite().any()
        large = torch.full((1, 24), 3e38)
        large[0, 1] = -3e38
        assert not ours(large).isfinite().any()
