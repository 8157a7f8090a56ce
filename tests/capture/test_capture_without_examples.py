"""Symbolic tracing without example inputs: models that use sizes without deciding by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from tests.support.agree import assert_same, run
from tests.support.edge_models import linear, module

Inputs = tuple[Tensor, ...]


def residual(self: Any, x: Tensor) -> Any:
    y = F.relu(self.bn(self.conv(x)), inplace=True)
    y = self.conv(y)
    y += x
    return self.act(y)


def concatenated_size(self: Any, x: Tensor) -> Any:
    return x.view(x.size()[:-1] + (2, 2))  # noqa: RUF005 - as people write it


def unpacked(self: Any, x: Tensor) -> Any:
    rows, columns = x.shape
    return x.reshape(rows, columns // 2, 2)


IMAGES = (torch.randn(2, 4, 8, 8),)
CONV: dict[str, Callable[[], Any]] = {
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "bn": lambda: nn.BatchNorm2d(4),
    "act": lambda: nn.ReLU(True),
}
CASES: dict[str, tuple[Callable[[], nn.Module], list[Inputs]]] = {
    "residual": (module(residual, **CONV), [IMAGES, (torch.randn(1, 4, 5, 7),)]),
    "flattened": (
        module(lambda s, x: s.fc(x.view(x.size(0), -1)), fc=linear),
        [(torch.randn(3, 2, 2),), (torch.randn(5, 4),)],
    ),
    "size and more": (module(concatenated_size), [(torch.randn(3, 4),), (torch.randn(2, 3, 4),)]),
    "unpacked": (module(unpacked), [(torch.randn(3, 4),)]),
    "arithmetic": (module(lambda s, x: x.view(x.shape[0] * x.shape[1], -1) / x.shape[0]), [(torch.randn(3, 4, 2),)]),
    "root": (module(lambda s, x: x / math.sqrt(x.size(-1)) + x.size(-1) ** 0.5), [(torch.randn(3, 4),)]),
    "last axis": (module(lambda s, x: x.sum(x.dim() - 1)), [(torch.randn(3, 4),)]),
    "ellipsis": (module(lambda s, x: x[..., 0] + x[..., 1:].sum(-1)), [(torch.randn(3, 4),), (torch.randn(2, 3, 4),)]),
    "makes tensors": (
        module(lambda s, x: x + torch.arange(x.shape[1]) + torch.zeros(x.shape[0], 1)),
        [(torch.randn(3, 4),)],
    ),
    "pooled": (module(lambda s, x: s.pool(x).flatten(1), pool=lambda: nn.AdaptiveAvgPool2d((1, 1))), [IMAGES]),
    "pooled in part": (module(lambda s, x: s.pool(x), pool=lambda: nn.AdaptiveAvgPool2d((1, None))), [IMAGES]),
    "dtype of a weight": (
        module(lambda s, x: s.fc(x.to(s.fc.weight.dtype)).to(x.dtype), fc=linear),
        [(torch.randn(3, 4).double(),)],
    ),
    "attention": (
        module(lambda s, x: (x @ x.transpose(-1, -2) / x.size(-1) ** 0.5).softmax(-1) @ x),
        [(torch.randn(2, 3, 4),)],
    ),
    "optional input": (module(lambda s, x, y=None: x if y is None else x * y), [(torch.randn(3),)]),
    "asks what it is": (module(lambda s, x: x * 2 if isinstance(x, Tensor) else x), [(torch.randn(3),)]),
}


@pytest.mark.parametrize(("build", "inputs"), CASES.values(), ids=CASES)
def test_one_program_serves_every_size(build: Callable[[], nn.Module], inputs: list[Inputs]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    program = qc.capture(model)
    assert program.method == "fx"
    program.verify()
    for args in inputs:
        assert_same(run(program, args).output, run(model, args).output)


def test_a_residual_sum_is_functional_where_weights_prove_the_dtype() -> None:
    program = qc.capture(module(residual, **CONV)().eval())
    assert program.opaque() == []
    assert "= add(" in program.dump()


def test_a_sum_in_place_stays_where_dtypes_could_differ() -> None:
    """`y += x` keeps y's dtype, `y + x` promotes: nothing says that the two inputs are of one."""

    def accumulate(self: Any, x: Tensor, y: Tensor) -> Any:
        total = x * 2
        total += y
        return total

    program = qc.capture(module(accumulate)())
    assert [str(node.target) for node in program.opaque()] == ["aten.add_.Tensor"]
    x, y = torch.randn(3), torch.randn(3).double()
    assert program(x, y).dtype is torch.float32
    assert torch.equal(program(x, y), module(accumulate)()(x, y))
