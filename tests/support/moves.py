"""Backends that move and join on grids by hand, and what NumPy makes of the same moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.integer.semantics import SEMANTICS, load
from quantc.ir.decisions import Fixed
from quantc.ir.program import Program
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import INT8, INT16, UINT8, QuantSpec

Function = Callable[..., Any]
NARROW = INT8.but(qmin=-100, qmax=90)
SPECS = {"uint8": (UINT8, 77), "int8": (INT8, -13), "narrow": (NARROW, 5), "int16": (INT16, 0)}
SCALE = float(np.float32(0.037))
JOINS = ("cat", "stack")

load()
MOVED = sorted(
    {
        name
        for name in SEMANTICS
        if SEMANTICS[name].write.__module__.rpartition(".")[2] in ("lower_moves", "lower_joins") and name not in JOINS
    }
)


def backend(grid: Fixed, out: str | None, other: Fixed | None = None) -> Backend:
    """Takes every move, from `grid`, and to `other` if `out` says so."""
    roles = {"x": "act"} if out is None else {"x": "act", "out": out}
    table = RuleTable("moves", (Rule("move", op(*MOVED, args="x"), roles),))
    return Backend("moves", table, roles={"act": grid, "other": other if other is not None else grid})


def fixed(spec: QuantSpec, zero_point: int, scale: float = SCALE) -> Fixed:
    return Fixed(scale, zero_point, spec)


def integer_form(program: Program, made_for: Backend) -> Program:
    return qc.convert(qc.prepare(program, made_for), to="integer")


class Model(nn.Module):
    """A function of its inputs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def captured(function: Function, *inputs: Tensor, method: Any = "fx") -> Program:
    return qc.capture(Model(function).eval(), inputs, method)


def levels(x: Tensor, spec: QuantSpec, zero_point: int, scale: float = SCALE) -> np.ndarray[Any, Any]:
    """The integers of a tensor, less the zero point, in NumPy."""
    inverse = np.float32(1.0 / scale)
    found = np.rint(x.numpy() * inverse) + np.float32(zero_point)
    return np.clip(found, spec.qmin, spec.qmax).astype(np.int64) - zero_point


def real(centered: Any, scale: float = SCALE) -> np.ndarray[Any, Any]:
    """What centered integers stand for, in float32."""
    return np.asarray(centered, dtype=np.float32) * np.float32(scale)


def moved(function: Function, x: Tensor, spec: QuantSpec, zero_point: int) -> list[Any]:
    """The oracle: the op in float64 on centered integers. What is lower than the grid becomes its lowest."""
    result = function(torch.from_numpy(levels(x, spec, zero_point)).double())
    items = result if isinstance(result, tuple | list) else [result]
    return [np.maximum(item.numpy(), spec.qmin - zero_point) for item in items]


def rescaled(centered: np.ndarray[Any, Any], scale: float, to: Fixed) -> np.ndarray[Any, Any]:
    """Centered integers on another grid, in float64; centered again."""
    found = np.rint(centered * (np.float64(scale) / np.float64(to.scale))) + to.zero_point
    clipped: np.ndarray[Any, Any] = np.clip(found, to.spec.qmin, to.spec.qmax) - to.zero_point
    return clipped


def results(program: Program, *inputs: Tensor) -> list[Any]:
    found = program(*inputs)
    return [item.numpy() for item in (found if isinstance(found, tuple | list) else [found])]


class Walk(fx.Interpreter):
    """Runs a program and notes the dtype of every value."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.dtypes: dict[str, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.dtypes[n.name] = value.dtype
        return value


def computes_on_integers(program: Program, inputs: Sequence[Tensor]) -> bool:
    """Whether every claimed op has integers for tensors, as the types say and in fact."""
    claimed = [node for node in program.graph.nodes if node in program.plan.claims]
    walk = Walk(program)
    walk.run(*inputs)
    for node in claimed:
        tensors = [walk.dtypes[other.name] for other in node.all_input_nodes if other.op != "get_attr"]
        if any(dtype.is_floating_point for dtype in tensors) or not tensors:
            return False
    kinds = {node.name: getattr(node.meta.get("val"), "dtype", None) for node in program.graph.nodes}
    wrong = [name for name, dtype in walk.dtypes.items() if kinds[name] not in (None, dtype)]
    return bool(claimed) and not wrong and not program.plan.left_float.rows


def images(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(seed)) * 3
