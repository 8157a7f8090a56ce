"""Programs in integer form that once went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.ir.program import Program

BACKENDS = ("x86", "qnnpack", "executorch")


class Calls(nn.Module):
    """A function with parameters."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def prepared(model: nn.Module, inputs: tuple[Tensor, ...], backend: str) -> Program:
    made = qc.prepare(qc.capture(model.eval(), inputs), backend)
    qc.calibrate(made, [inputs])
    return made


def check(model: nn.Module, inputs: tuple[Tensor, ...], backend: str, **options: Any) -> Program:
    """Both forms agree as they should, op by op."""
    made = prepared(model, inputs, backend)
    integer = qc.convert(made, to="integer", **options)
    integer.verify()
    found = qc.agreement(qc.convert(made), integer, [inputs])
    assert found.worst <= 1, str(found)
    assert found.clear_equal >= 0.999, str(found)
    return integer


@pytest.mark.parametrize("reach", [2.0, 60.0, 200.0])
def test_a_dead_channel_beside_a_sum_in_fixed_form(reach: float) -> None:
    """Its weight scale is the smallest there is, so its bias is an accumulator of nearly 30 bits."""
    torch.manual_seed(0)
    conv, then = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
    with torch.no_grad():
        conv.weight[3], conv.bias[3] = 0, 1.0  # type: ignore[index]
    x, y = torch.randn(2, 8, 8, 8), torch.rand(2, 8, 8, 8) * (reach + 2) - reach
    model = Calls(lambda self, x, y: self.then(torch.relu(self.conv(x) + y)), conv=conv, then=then)
    check(model, (x, y), "x86", multiplier="fixed")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_that_is_one_number(backend: str) -> None:
    torch.manual_seed(0)
    w, b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(1))
    check(Calls(lambda self, x: F.linear(x, self.w, self.b), w=w, b=b), (torch.randn(4, 8),), backend)


def test_a_mean_of_a_single_number() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    model = Calls(lambda self, x: self.layer(x).sum().mean(dim=0) * self.layer(x), layer=layer)
    check(model, (torch.randn(4, 8),), "qnnpack")


@pytest.mark.parametrize("backend", BACKENDS)
def test_agreement_of_a_program_with_branches(backend: str) -> None:
    torch.manual_seed(0)

    def forward(self: Any, x: Tensor) -> Any:
        taken = torch.cond(x.sum() > 0, lambda x: self.one(x) - 1, lambda x: self.two(x) + 1, (x,))
        return self.one(torch.relu(taken))

    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    inputs = torch.randn(4, 8)
    made = qc.prepare(qc.capture(Calls(forward, one=one, two=two).eval(), (inputs,)), backend)
    qc.calibrate(made, [(inputs,), (-inputs,)])
    found = qc.agreement(qc.convert(made), qc.convert(made, to="integer"), [(inputs,), (-inputs,)])
    assert found.worst <= 1


@pytest.mark.slow
def test_compiled_with_the_channels_last_in_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    integer = qc.convert(prepared(model, (x,), "qnnpack"), to="integer")
    with torch.no_grad():
        assert torch.equal(torch.compile(integer.module)(x), integer(x))
