"""A small network with a bit of everything, its data, and its training and conversion."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import QuantcError
from quantc.ir.program import Program
from quantc.spec.formats import PerTensor

ACT = qc.UINT8

NET_SHAPE = (4, 3, 8, 8)

SYMMETRIC = qc.INT8_NARROW_WEIGHT

CONFIGS = {
    "default": qc.QuantConfig(),
    "4 bits": qc.QuantConfig().set_all(SYMMETRIC.but(qmin=-7, qmax=7)),
    "whole weights": qc.QuantConfig().set_all(SYMMETRIC.but(granularity=PerTensor())),
    "grown ranges": qc.QuantConfig().set_all(ACT.but(observe="minmax")),
    "learned": qc.QuantConfig().set_all(ACT.but(observe="lsq-plus")).set_all(SYMMETRIC.but(observe="lsq")),
    "learned whole": qc.QuantConfig().set_all(SYMMETRIC.but(observe="lsq", granularity=PerTensor())),
    "fixed": qc.QuantConfig().set("conv2", ACT.but(observe="fixed{scale=0.02 zero_point=3}")),
    "fitted": qc.QuantConfig().set_all(SYMMETRIC.but(qmin=-7, qmax=7, observe="fit")),
    "dynamic": qc.QuantConfig().set("head", qc.UINT8_DYNAMIC.but(qmax=127)),
    "weight-only": qc.QuantConfig().set("head", qc.INT8_WEIGHT_ONLY).set("conv2", qc.FP8_E4M3_WEIGHT),
    "left float": qc.QuantConfig().set("conv2", qc.FLOAT),
}


class Net(nn.Module):
    """A bit of everything: norms behind products and apart, dropout, a residual sum, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8, eps=1e-3, momentum=0.3)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.apart = nn.BatchNorm2d(8, momentum=0.2)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)
        self.last = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Any:
        y = functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        y = torch.relu(self.norm2(self.conv2(y)) + y)
        return self.last(self.head(self.drop(self.apart(y).mean((2, 3)))))


def batches(count: int, shape: tuple[int, ...] = NET_SHAPE) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(shape) + 0.2, torch.randint(0, 5, shape[:1])) for _ in range(count)]


def net() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for x, _ in batches(3):
        model(x)
    return model.eval()


def prepared(backend: Any = "x86", config: qc.QuantConfig | None = None) -> Program:
    return qc.prepare(qc.capture(net(), (batches(1)[0][0],)), backend, config=config, qat=True)


def trained(program: Program, steps: int = 4) -> Program:
    optimizer = torch.optim.SGD(program.parameters(), lr=0.05, momentum=0.9)
    qc.qat.train(program, batches(steps), functional.cross_entropy, optimizer)
    return program


def assert_converts_exactly(program: Program, *inputs: Any, **keywords: Any) -> Program:
    """What it gives in eval mode is what the converted program gives, bit for bit."""
    program.eval()
    converted = qc.convert(program)
    with torch.no_grad():
        ours, theirs = program(*inputs, **keywords), converted(*inputs, **keywords)
    for mine, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other
    return converted


def refused(kind: type[QuantcError], *words: str) -> Any:
    """The error, and that it says what, where and what to do."""

    class Check:
        def __enter__(self) -> Check:
            self.context = pytest.raises(kind)
            self.info = self.context.__enter__()
            return self

        def __exit__(self, *details: Any) -> Any:
            done = self.context.__exit__(*details)
            error = self.info.value
            assert error.where, "it does not say where"
            assert error.advice, "it does not say what to do"
            for word in words:
                assert word in str(error)
            return done

    return Check()


SMALL_BATCH = (torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1]))


def small_model() -> nn.Module:
    """A convolution with its norm, and a linear."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()


@cache
def _captured_small() -> Program:
    return qc.capture(small_model(), (SMALL_BATCH[0],))


def small_program() -> Program:
    return _captured_small().clone()


def small_prepared(backend: Any = "x86", **options: Any) -> Program:
    return qc.prepare(small_program(), backend, qat=True, **options)


def sgd(program: Program, rate: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(program.parameters(), lr=rate)
