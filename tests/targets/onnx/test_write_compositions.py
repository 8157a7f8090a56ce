"""ONNX writers of ops that ONNX does not have: composed of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.onnx_ops import (
    Cases,
    check_case,
    check_function,
    drawn,
    op_types,
)

X, Y, Z = (4, 6), (4, 3, 8, 8), (4, 5, 6)
"""Shapes: a matrix, images, sequences. The first size varies."""
ORDERS = (0, 1, 2, 3, 0.5, torch.inf, -torch.inf)
CASES: Cases = {
    "compositions": (
        lambda x: (
            F.cosine_similarity(x, x.flip(1), 1)[:, None]
            + torch.addcmul(x, x, x, value=0.5)
            + F.threshold(x, 0.1, 3.0)
            + torch.max(x, x.flip(1))
            + 2.0**x
        ),
        X,
    ),
    "one-hot": (lambda x: F.one_hot((x > 0).long(), 3), X),
    "tile-interleave": (lambda x: torch.tile(x, (2,)).repeat_interleave(2, 1), X),
}
FIXED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "norms": (
        lambda x: torch.stack([torch.linalg.vector_norm(x, order, 1) for order in ORDERS]),
        torch.tensor([[0.0, 2.0, -3.0, 0.0], [1.0, -1.0, 0.5, 4.0]]),
    ),
    "norm-of-all": (lambda x: torch.linalg.vector_norm(x, keepdim=True), torch.randn(3, 4)),
    "extremes-of-two": (lambda x: torch.max(x, x[:1]) - torch.min(x, x[1:2]), torch.randn(3, 4)),
    "extremes-of-all": (lambda x: x.max() + x.min() * x.prod(), torch.randn(3, 4)),
    "products": (lambda x: x.prod(0, keepdim=True), torch.randn(3, 4)),
    "log-sum-exp": (lambda x: x.logsumexp((0, 1)) + x.logsumexp(1, keepdim=True), torch.randn(3, 4) * 30),
    "log-sigmoid": (F.logsigmoid, torch.linspace(-90, 90, 19)),
    "threshold": (lambda x: F.threshold(x, 0.5, -2.0), torch.arange(-4, 5) / 4),
    "quotients": (lambda x: torch.addcdiv(x, x + 1, x.abs() + 1, value=-0.5), torch.randn(3, 4)),
    "between": (lambda x: torch.lerp(x, x + 3, 0.25) + torch.lerp(x, -x, torch.sigmoid(x)), torch.randn(3, 4)),
    "outer": (lambda x: torch.outer(x, x[:2]), torch.randn(4)),
    "similar-broadcast": (lambda x: F.cosine_similarity(x, x[:1], 1), torch.randn(3, 4)),
    "similar-to-nothing": (lambda x: F.cosine_similarity(x, x + 1, 0, eps=0.1), torch.zeros(3, 4)),
    "tiled": (lambda x: torch.tile(x, (2, 1, 3)), torch.randn(3, 4)),
    "sorted": (lambda x: (*x.sort(0), x.argsort(1, descending=True)), torch.randn(3, 4)),
    "one-hot-of-one": (lambda x: F.one_hot(x, 4), torch.tensor(2)),
}
"""For the size they were captured with."""
CAPTURED_SIZE = {"one-hot"}
"""Only for the size they were captured with: what they do to the first axis, torch.export wants fixed."""


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_what_torch_has(name: str) -> None:
    check_case(CASES[name], is_open=name not in CAPTURED_SIZE)


@pytest.mark.parametrize("name", FIXED)
def test_a_corner_is_what_torch_has(name: str) -> None:
    function, x = FIXED[name]
    check_function(function, x)


def test_a_norm_that_onnx_has_is_one_op() -> None:
    assert op_types(lambda x: torch.linalg.vector_norm(x, 1, 1), drawn(3, 4)) == ["ReduceL1"]
    assert op_types(lambda x: torch.linalg.vector_norm(x, 2, 1), drawn(3, 4)) == ["ReduceL2"]
