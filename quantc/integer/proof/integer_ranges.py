"""Integer ranges of quantized tensors."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quantc.integer.library import op_of
from quantc.integer.move_ops import MOVES
from quantc.ir.dialect import argument, op_name, ops_in, position
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.types import dtype_of
from quantc.qdq.choose_qparams import CHOOSE

HANDED_ON = {*MOVES, *ops_in(Family.PAD, Family.JOIN, Family.MAX_POOL), "max_pool2d_with_indices"}
"""Ops that yield integers they were given; where they pad, the zero point of their grid or nothing that counts."""

TABLES = {"lookup": "table", "steps": "levels"}
"""Ops whose results all stand in a table, and which argument that is."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Integers of activations, from `qmin` to `qmax`."""

    qmin: int
    qmax: int
    dtype: torch.dtype
    zero_point: int | None = None
    """None if it is not known before the program runs, or there are several."""

    @property
    def signed(self) -> bool:
        return self.dtype.is_signed

    @property
    def is_byte(self) -> bool:
        return self.dtype in (torch.int8, torch.uint8)

    @property
    def centered(self) -> tuple[int, int]:
        """The range minus the zero point; minus any possible one, if it is unknown."""
        if self.zero_point is None:
            return self.qmin - self.qmax, self.qmax - self.qmin
        return self.qmin - self.zero_point, self.qmax - self.zero_point


def levels_before(dequantize: fx.Node) -> Levels:
    """Integers that a dequantize op reads."""
    qmin, qmax = (argument(dequantize, f"quant_{end}") for end in ("min", "max"))
    dtype = argument(dequantize, "dtype")
    if not isinstance(qmin, int) or not isinstance(qmax, int):
        qmin, qmax = _all_of(dtype)
    zero_point = argument(dequantize, "zero_point") if "per_tensor" in str(dequantize.target) else None
    found = dequantize.args[2] if len(dequantize.args) > 2 else None
    choice = found.args[0] if isinstance(found, fx.Node) and found.target is operator.getitem else None
    if isinstance(choice, fx.Node) and choice.target is CHOOSE:
        zero_point = argument(choice, "zero_point")
    return Levels(qmin, qmax, dtype, zero_point if isinstance(zero_point, int) else None)


def levels_of(program: Program, node: fx.Node, zero_point: Any) -> Levels:
    """Integers that a tensor of the integer form holds."""
    dtype = dtype_of(node)
    if dtype is None:
        raise ValueError(f"{node.name} is no tensor")
    if not isinstance(zero_point, int):
        held = program.tensor(zero_point) if isinstance(zero_point, fx.Node) else torch.zeros(1)
        zero_point = int(held.reshape(-1)[0]) if held is not None and held.numel() == 1 else None
    return Levels(*_limits(program, node, dtype), dtype, zero_point)


def _limits(program: Program, node: fx.Node, dtype: torch.dtype) -> tuple[int, int]:
    """Smallest and largest integer of a node; value-preserving ops are looked through."""
    ends: list[tuple[int, int]] = []
    seen, waiting = {node}, [node]
    while waiting:
        here = waiting.pop()
        sources = _value_sources(here, dtype)
        if not sources:
            ends.append(_table_range(program, here) or _own_limits(here, dtype))
        waiting += [source for source in sources if source not in seen]
        seen.update(sources)
    return min(low for low, _ in ends), max(high for _, high in ends)


def _value_sources(node: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    """The nodes whose integers a node yields again; none if it makes its own."""
    if node.target is operator.getitem:
        return list(node.all_input_nodes)
    if op_name(node) not in HANDED_ON:
        return []
    return [value for value in node.all_input_nodes if dtype_of(value) == dtype]


def _table_range(program: Program, node: fx.Node) -> tuple[int, int] | None:
    """The ends of the table a node takes its results from; None if there is no such table."""
    op = op_of(node.target)
    if op is None or op.name not in TABLES:
        return None
    entries = program.tensor(argument(node, TABLES[op.name]))
    return None if entries is None else (int(entries.min()), int(entries.max()))


def _own_limits(node: fx.Node, dtype: torch.dtype) -> tuple[int, int]:
    """The bounds of the clamp a node ends with, or of its type."""
    if op_name(node) == "cast" and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    ends: tuple[Any, Any] = (None, None)
    if op_name(node) == "clamp":
        ends = argument(node, "min"), argument(node, "max")
    elif op_of(node.target) is not None:
        given = {name: argument(node, name) for name in ("qmin", "qmax") if position(node.target, name) >= 0}
        ends = given.get("qmin"), given.get("qmax")
    (low, high), (least, most) = ends, _all_of(dtype)
    if isinstance(low, int) and isinstance(high, int) and least <= low <= high <= most:
        return low, high
    return least, most


def _all_of(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
