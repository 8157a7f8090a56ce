"""Functions of one number by definition, and the curves and grids they are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import quantc as qc
from quantc.integer.grid import Grid
from quantc.integer.match_lowering import Task
from quantc.ir.curves import Curve
from quantc.ir.dialect import curve_of, op_name
from tests.support.integer_matches import calibrated

aten = torch.ops.aten
Real = Callable[[float], float]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _expm1(x: float) -> float:
    return math.expm1(min(x, 0.0))


def _tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ONE: dict[str, tuple[tuple[Any, ...], Real]] = {
    "relu": ((), lambda x: max(x, 0.0)),
    "clamp": ((-1.5, 2), lambda x: min(max(x, -1.5), 2.0)),
    "clamp to nothing": ((2, -1.5), lambda x: -1.5),
    "hardswish": ((), lambda x: x * min(max(x + 3, 0), 6) / 6),
    "hardsigmoid": ((), lambda x: min(max(x + 3, 0), 6) / 6),
    "silu": ((), lambda x: x * _sigmoid(x)),
    "mish": ((), lambda x: x * math.tanh(_softplus(x))),
    "gelu": ((), lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2))),
    "gelu tanh": (("tanh",), _tanh_gelu),
    "leaky_relu": ((), lambda x: x if x > 0 else 0.01 * x),
    "leaky_relu falling": ((-0.3,), lambda x: x if x > 0 else -0.3 * x),
    "elu": ((), lambda x: x if x > 0 else _expm1(x)),
    "elu falling": ((-0.5, 2.0, 1.5), lambda x: 2 * x if x > 0 else -1.0 * _expm1(1.5 * x)),
    "selu": ((), lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * _expm1(x))),
    "celu": ((2.5,), lambda x: x if x > 0 else 2.5 * _expm1(x / 2.5)),
    "sigmoid": ((), _sigmoid),
    "tanh": ((), math.tanh),
    "softshrink": ((0.7,), lambda x: math.copysign(max(abs(x) - 0.7, 0.0), x)),
    "softplus": ((), lambda x: x if x > 20 else _softplus(x)),
    "softplus that drops": ((3.0, 1.0), lambda x: x if x * 3.0 > 1 else _softplus(3 * x) / 3),
}
"""Options of the op, and what it is by definition."""


def curve(name: str) -> Curve:
    """What the table of curves has for an op with its options."""
    graph, op = fx.Graph(), name.partition(" ")[0]
    target, options = getattr(aten, op).default, ONE[name][0]
    x = graph.placeholder("x")
    named = {"approximate": options[0]} if op == "gelu" and options else {}
    found = curve_of(graph.call_function(target, (x, *(() if named else options)), named))
    assert found is not None
    return found


def grid(scale: float, zero_point: int = 0, dtype: torch.dtype = torch.uint8) -> Grid:
    info = torch.iinfo(dtype)
    step = torch.tensor(scale, dtype=torch.float32).double()
    return Grid(step, torch.tensor(zero_point), info.min, info.max, dtype)


def is_rounding_of(level: int, real: float, out: Grid, within: float = 1e-9) -> bool:
    """Whether an integer of a grid is what a number of its steps rounds to; by a tie it may be either neighbour."""
    steps = real / out.one_scale
    either = {round(steps - within), round(steps + within)}
    return level in {min(max(item + out.one_zero_point, out.qmin), out.qmax) for item in either}


SEEDS = st.integers(0, 2**32 - 1)


EIGHT_BITS = st.sampled_from([torch.uint8, torch.int8])


class Of(nn.Module):
    """A model that is a function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def lone_match(name: str, forward: Callable[..., Tensor], backend: str) -> tuple[Task, fx.Node]:
    """The match that is one named op of a converted program, and the node that quantizes its result."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    program = qc.convert(calibrated(qc.capture(Of(forward).eval(), (x,)), backend, [x]))
    (core,) = [node for node in program.graph.nodes if op_name(node) == name]
    (quantizer,) = core.users
    return Task(program, (core,)), quantizer
