"""Activations written by hand are recognised by what they compute; nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    "hardsigmoid": [
        lambda x: F.relu6(x + 3) / 6,
        lambda x: (0.5 + x * (1 / 6)).clamp(0, 1),
        lambda x: (0.1666667 * x + 0.5).clamp(0, 1),
    ],
    "leaky_relu": [lambda x: torch.maximum(x, 0.01 * x), lambda x: F.relu(x) - 0.01 * F.relu(-x)],
    "elu": [lambda x: F.relu(x) - F.relu(1 - torch.exp(x))],
    "softplus": [lambda x: F.relu(x) + torch.log1p(torch.exp(-x.abs()))],
    "tanh": [lambda x: 2 * torch.sigmoid(2 * x) - 1],
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


NEAR_MISSES: list[Function] = [
    lambda x: F.silu(x).clamp(max=100.0),
    lambda x: F.relu(x).clamp(max=65),
    lambda x: F.relu(torch.fmod(x, 64)),
    lambda x: F.relu(torch.minimum(x, torch.tensor(900.0))),
    lambda x: F.relu(x.clamp(max=1e3)),
    lambda x: F.relu(x.clamp(max=1e35)),
    lambda x: torch.log(F.softplus(x) + 1e-6),
    lambda x: 1 / (F.relu(x) + 1e-6),
    lambda x: 1 / (F.relu(x) + 1e-12),
    lambda x: torch.rsqrt(F.relu(x) + 1e-6),
    lambda x: torch.sqrt(F.relu(x) + 1e-7),
    lambda x: torch.log(torch.sigmoid(x).clamp(1e-6, 1 - 1e-6)),
    lambda x: torch.atanh(torch.tanh(x).clamp(-1 + 1e-6, 1 - 1e-6)),
    lambda x: torch.atanh(torch.tanh(x).clamp(-1 + 1e-7, 1 - 1e-7)),
    lambda x: F.relu(torch.round(x, decimals=3)),
    lambda x: F.relu(torch.round(x * 1000) / 1000),
    lambda x: F.relu((x + 1.5 * 2**23) - 1.5 * 2**23),  # rounds to integers
    lambda x: F.relu(torch.nan_to_num(x)),
    lambda x: F.relu(x) * 1.000001,
    lambda x: torch.log(1 + torch.exp(x)),  # infinite from 89 on
    lambda x: F.relu(x) + F.relu(x - 1000) - 2 * F.relu(x - 1001) + F.relu(x - 1002),
]


@pytest.mark.parametrize("method", ["export", "fx"])
def test_what_differs_far_out_or_by_little_stays(method: str) -> None:
    for number, function in enumerate(NEAR_MISSES):
        assert not fused(function, method).log[-1].changed, number


def test_a_bound_behind_an_activation_stays() -> None:
    assert ops(fused(lambda x: (x * torch.sigmoid(x)).clamp(max=100.0))) == ["linear", "silu", "clamp"]


def test_state_that_is_loaded_is_no_constant() -> None:
    class Saved(nn.Module):
        b: Tensor

        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.register_buffer("b", torch.tensor(1.702), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.b * x)

    passes = Pipeline.parse("canonicalize,fold-constants,fuse-activations")
    x = torch.randn(4)
    for method in ("export", "fx"):
        saved, constant = (passes.run(qc.capture(Saved(kind).eval(), (x,), method=method)) for kind in (True, False))
        assert "silu" not in ops(saved)
        assert "silu" in ops(constant)
        saved.load_state_dict({"b": torch.tensor(3.0)})
        assert torch.allclose(saved(x), x * torch.sigmoid(3 * x))


UNARY: list[Callable[[float], Function]] = [
    lambda c: F.relu,
    lambda c: torch.sigmoid,
    lambda c: torch.tanh,
    lambda c: F.softplus,
    lambda c: F.silu,
    lambda c: F.relu6,
    lambda c: torch.abs,
    lambda c: torch.neg,
    lambda c: lambda x: x + c,
    lambda c: lambda x: x * c,
    lambda c: lambda x: x / c,
    lambda c: lambda x: x.clamp(max=c),
    lambda c: lambda x: x.clamp(min=-c),
    lambda c: lambda x: x.clamp(-c, c),
    lambda c: lambda x: x * torch.sigmoid(x),
    lambda c: lambda x: x * F.relu6(x + 3) / 6,
    lambda c: lambda x: 1 / (1 + torch.exp(-x)),
]
NUMBERS = (1e-9, 1e-7, 1e-6, 1e-3, 0.5, 1.0, 1.702, 2.0, 3.0, 6.0, 65.0, 1e3, 1e9, 1e20)
STEPS = st.lists(
    st.tuples(st.sampled_from(UNARY), st.sampled_from(NUMBERS), st.booleans()),
    min_size=2,
    max_size=5,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(STEPS, st.sampled_from(["last", "times x"]))
def test_whatever_is_replaced_computes_the_same(
    steps: list[tuple[Callable[[float], Function], float, bool]], end: str
) -> None:
    made = [make(number) for make, number, _ in steps]

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x
            for function in made:
                y = function(y)
            return x * y if end == "times x" else y

    torch.manual_seed(0)
    x = torch.cat([torch.randn(2000) * 10.0**k for k in range(-6, 7)])
    program = Pipeline.parse("canonicalize,fold-constants,fuse-activations").run(qc.capture(Chain(), (x,)))
    if not program.log[-1].changed:
        return
    largest, y = x.abs().clamp(min=1e-30), x
    for function in made:
        y = function(y)
        largest = torch.maximum(largest, y.abs().nan_to_num(0.0, posinf=0.0))
    want, got = Chain()(x), program(x)
    scale = torch.maximum(largest, want.abs().nan_to_num(0.0, posinf=0.0))
    if end == "times x":
        scale = scale * x.abs().clamp(min=1)
    assert bool(((want == got) | ((want - got).abs() <= 1e-6 * scale) | want.isnan()).all())


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
