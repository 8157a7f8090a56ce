"""ONNX writers of indexing, and of tensors made from nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.onnx_ops import (
    Cases,
    check_case,
    check_function,
    drawn,
    op_types,
    refusal,
)

X, Y, Z = (4, 6), (4, 3, 8, 8), (4, 5, 6)
"""Shapes: a matrix, images, sequences. The first size varies."""
CASES: Cases = {
    "select-slice": (lambda x: x[:, 1] + x[:, -1] + x[:, 1:5:2].sum(1) + x.narrow(1, 2, 2).sum(1), X),
    "gather": (lambda x: x.gather(1, (x > 0).long()) + x.index_select(1, torch.tensor([1, 0])), (4, 2)),
    "index-one": (lambda x: x[:, torch.tensor([[0, 2], [1, 1]])], X),
    "index-two": (lambda x: x[:, torch.tensor([0, 2]), torch.tensor([1, 3])], Z),
    "index-front": (lambda x: x[torch.tensor([0, 2]), torch.tensor([1, 3])], Z),
    "made": (lambda x: x + torch.arange(6) + torch.ones_like(x) + torch.full((6,), 2.0) + x.new_zeros(6), X),
    "triangles": (lambda x: x.tril() + x.triu(1), Z),
}
FIXED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "narrow-from-the-end": (lambda x: x.narrow(1, -2, 2), torch.randn(3, 4)),
    "arange-of-floats": (lambda x: x + torch.arange(0.1, -4.9, -1), torch.randn(1)),
    "index-apart": (lambda x: x[torch.tensor([0, 1]), :, torch.tensor([[2], [0]])], torch.randn(2, 3, 4)),
    "index-by-one-number": (lambda x: x.index_select(1, torch.tensor(2)), torch.randn(3, 4)),
    "gather-a-number": (lambda x: x.gather(0, torch.tensor([0, 0])), torch.tensor(5.0)),
    "slices-from-the-end": (lambda x: torch.cat([x[-3:-1], x[1:], x[:100:2]]), torch.arange(6.0)),
    "triangle-of-bools": (lambda x: torch.stack([(x > 0).tril(-1), (x > 0).triu(1)]), torch.randn(4, 4)),
    "like": (
        lambda x: torch.full_like(x, 2.5) + x.new_full((3, 1), 0.5) + x.new_ones(4) + torch.zeros_like(x),
        torch.randn(3, 4),
    ),
    "counted": (lambda x: x + torch.arange(8, 0, -2) + torch.arange(2, 6), torch.randn(4)),
}
"""For the size they were captured with."""
CAPTURED_SIZE = {"index-front"}
"""Only for the size they were captured with: what they do to the first axis, torch.export wants fixed."""


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_what_torch_has(name: str) -> None:
    check_case(CASES[name], is_open=name not in CAPTURED_SIZE)


@pytest.mark.parametrize("name", FIXED)
def test_a_corner_is_what_torch_has(name: str) -> None:
    function, x = FIXED[name]
    check_function(function, x)


def test_the_whole_of_an_axis_is_no_slice() -> None:
    assert op_types(lambda x: x[:, :].abs(), drawn(3, 4)) == ["Abs"]
    assert op_types(lambda x: x[:, 1:].abs(), drawn(3, 4)) == ["Slice", "Abs"]


def test_a_mask_is_no_index() -> None:
    constant = torch.tensor([True, False, True])
    told = refusal(lambda x: torch.ops.aten.index(x, [constant]), drawn(3))
    assert "is indexed by a mask" in told
