"""ONNX writers of reductions and norms."""

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
    refusal,
)

X, Y, Z = (4, 6), (4, 3, 8, 8), (4, 5, 6)
"""Shapes: a matrix, images, sequences. The first size varies."""
CASES: Cases = {
    "mean-of-image": (lambda x: x.mean((2, 3)) + x.mean((-1, -2), keepdim=True).flatten(1), Y),
    "reductions": (lambda x: x.sum(1) + x.amax(-1) + x.amin((1,)) + x.max(1).values + x.prod(1) + x.logsumexp(1), X),
    "places": (lambda x: (x.argmax(1), x.min(1).indices, x.topk(2, 1).indices, x.sort(1, descending=True).values), X),
    "deviations": (lambda x: x.var(1) + x.std(1, correction=0) + x.norm(dim=1) + x.norm(1, dim=1), X),
    "cumsum": (lambda x: x.cumsum(1) + x.flip(1).cumsum(-1), X),
    "any": (lambda x: (x > 1).any(1), X),
    "layer-norm": (lambda x: F.layer_norm(x, (5, 6)) + F.layer_norm(x, (6,), torch.full((6,), 2.0)), Z),
    "rms-norm": (lambda x: F.rms_norm(x, (6,), torch.full((6,), 2.0)), Z),
    "group-norm": (lambda x: F.group_norm(x.repeat(1, 2, 1, 1), 3, torch.arange(6.0), torch.ones(6)), Y),
    "instance-norm": (lambda x: F.instance_norm(x, weight=torch.arange(3.0)), Y),
    "batch-norm": (lambda x: F.batch_norm(x, torch.ones(3), torch.full((3,), 2.0)), Y),
}
FIXED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "argmax-kept": (lambda x: x.argmax(keepdim=True), torch.randn(3, 4)),
    "over-all": (lambda x: torch.stack([x.sum(), x.mean(), x.amax(), x.amin(), x.var()]), torch.randn(3, 4)),
    "sum-of-bools": (lambda x: (x > 0).sum(0), torch.randn(3, 4)),
    "smallest": (lambda x: (*x.topk(2, 0, largest=False), *x.min(0, keepdim=True), x.argmin()), torch.randn(5, 4)),
    "any-kept": (lambda x: ((x > 1).any(0, keepdim=True), (x > 1).any(), (x > 9).any((0, 1))), torch.randn(3, 4)),
    "corrections": (lambda x: x.var((0, 1), correction=0) + x.var(1, correction=2, keepdim=True), torch.randn(3, 4)),
    "rms-norm-plain": (lambda x: F.rms_norm(x, (3, 4), eps=1e-3), torch.randn(2, 3, 4)),
}
"""For the size they were captured with."""


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_what_torch_has(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("name", FIXED)
def test_a_corner_is_what_torch_has(name: str) -> None:
    function, x = FIXED[name]
    check_function(function, x)


def test_a_mean_over_images_is_the_pool_that_runtimes_have_on_integers() -> None:
    images = drawn(2, 3, 4, 5)
    assert op_types(lambda x: x.mean((2, 3)), images) == ["GlobalAveragePool", "Squeeze"]
    assert op_types(lambda x: x.mean((-1, -2), keepdim=True), images) == ["GlobalAveragePool"]
    assert op_types(lambda x: x.mean((1, 2)), images) == ["ReduceMean"]


def test_norms_by_statistics_of_their_own_are_refused() -> None:
    images, ones = drawn(4, 3, 5, 5), torch.ones(3)
    assert "running statistics" in refusal(lambda x: F.instance_norm(x, ones, ones, use_input_stats=False), images)
    assert "training mode" in refusal(lambda x: F.batch_norm(x, None, None, training=True), images)
