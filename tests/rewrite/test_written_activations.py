"""Activations written by hand are recognised by what they compute; nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from quantc.passes.fuse_activations import FuseActivations
from quantc.pipeline.pipeline import Pipeline

Function = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.fc = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


SIX = torch.tensor(6.0)
SPELLINGS: dict[str, list[Function]] = {
    "hardswish": [
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x * (F.relu6(x + 3) * (1 / 6)),
        lambda x: x * (torch.clamp(3 + x, 0, 6) / 6),
        lambda x: F.hardtanh(x + 3.0, 0.0, 6.0).mul(x).div(6),
        lambda x: F.hardsigmoid(x) * x,
        lambda x: x * (x / 6 + 0.5).clamp(0, 1),
        lambda x: (0.16666667 * x) * torch.minimum(F.relu(x + 3), SIX),
    ],
    "hardsigmoid": [lambda x: F.relu6(x + 3) / 6, lambda x: (0.5 + x * (1 / 6)).clamp(0, 1)],
    "silu": [
        lambda x: x * torch.sigmoid(x),
        lambda x: x / (1 + torch.exp(-x)),
        lambda x: x * (0.5 + 0.5 * torch.tanh(x / 2)),
    ],
    "gelu": [
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * 0.5 * (1.0 + torch.erf(x * 0.70710678)),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
    ],
    "mish": [lambda x: x * torch.tanh(F.softplus(x)), lambda x: x * torch.tanh(torch.log(1 + torch.exp(x)))],
    "sigmoid": [lambda x: 1 / (1 + torch.exp(-x))],
    "relu": [lambda x: (x + x.abs()) / 2],
}


def fused(function: Function, method: str = "export") -> Program:
    torch.manual_seed(0)
    program = qc.capture(Net(function).eval(), (torch.randn(4, 8) * 3,), method=method)  # type: ignore[arg-type]
    Pipeline.parse("canonicalize,fold-constants").run(program)
    return Pipeline((FuseActivations(),)).run(program, [Truth(), Verify(), Guard()])


def ops(program: Program) -> list[str]:
    return [op_name(node) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("method", ["export", "fx"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_becomes_the_op(name: str, method: str) -> None:
    x = torch.linspace(-50, 50, 8 * 500).reshape(500, 8)
    for function in SPELLINGS[name]:
        program = fused(function, method)
        assert ops(program) == ["linear", name]
        model = Net(function)
        model.load_state_dict(
            {key: value.clone() for key, value in program.state_dict().items() if key.startswith("fc")}
        )
        assert torch.allclose(program(x), model(x), rtol=1e-5, atol=1e-5)


def test_the_form_of_gelu_is_that_of_its_arithmetic() -> None:
    programs = [fused(SPELLINGS["gelu"][index]) for index in (0, 2)]
    forms = [argument(program.graph.output_node().all_input_nodes[0], "approximate") for program in programs]
    assert forms == ["none", "tanh"]


def test_quick_gelu_is_a_silu_of_a_multiple() -> None:
    program = fused(lambda x: x * torch.sigmoid(1.702 * x))
    assert ops(program) == ["linear", "mul", "silu", "div"]
    assert not Pipeline((FuseActivations(),)).run(program).log[-1].changed
    tidy = Pipeline.parse("fuse").run(program)
    assert ops(tidy) == ["linear", "silu", "div"]  # the linear takes up the factor


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * F.relu6(x + 3) / 7,
        lambda x: x * F.relu6(x + 2.99) / 6,
        lambda x: x * torch.sigmoid(x.flip(0)),
        lambda x: 0.5 * x * (1 + torch.erf(x / 1.4)),
        lambda x: x.double() * torch.sigmoid(x.double()),
        lambda x: x * torch.sigmoid(x.mean(0, keepdim=True)),
        lambda x: torch.log(x) * 0 + x,
        lambda x: x + x,
    ],
)
def test_what_computes_something_else_stays(function: Function) -> None:
    program = fused(function)
    assert not program.log[-1].changed
    assert not {"hardswish", "silu", "gelu"} & set(ops(program))


def test_a_part_that_others_read_stays() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            gate = torch.sigmoid(x)
            return x * gate, gate

    program = Pipeline.parse("canonicalize,fuse-activations").run(qc.capture(Two(), (torch.randn(4),)))
    assert ops(program) == ["sigmoid", "mul"]


def test_a_learned_slope_stays() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.beta * x)

    program = Pipeline.parse("canonicalize,fuse-activations").run(qc.capture(Learned(), (torch.randn(4),)))
    assert "silu" not in ops(program)
