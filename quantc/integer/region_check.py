"""Finds integer regions and stray float tensors inside them.

Every tensor has a dtype, so this is read off the graph. An integer region begins where numbers are rounded to integers
and ends where integers are dequantized; in between, float64 is allowed only from an exact sum to its rounding: the
multiplier of the integer form. Nodes of unknown type cannot be judged.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.out_dtype import out_dtype
from torch._ops import HigherOrderOperator, OpOverload

from quantc.errors import VerifyError
from quantc.integer.library import IntegerOp, op_of
from quantc.ir.dialect import op_name, short_name
from quantc.ir.program import Program
from quantc.ir.types import TensorType, TupleType, type_of
from quantc.qdq.ops import is_choice, is_dequantize, is_quantize

MOVES = frozenset(
    [
        "reshape",
        "view",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "expand",
        "select",
        "slice",
        "contiguous",
        "clone",
        "cat",
    ]
)
"""Ops, by the name of their schema, that hand numbers on as they are."""
SHIFTS = frozenset({"add", "sub", "rsub", "clamp"})
"""Ops allowed between a rounding and the cast to an integer."""
MULTIPLIER = MOVES | SHIFTS | {"to", "mul", "div", "round"}
"""Ops allowed in float64 between an exact sum and the result."""
INDEXING = frozenset(["index", "index_select", "gather", "embedding", "where", "masked_fill", "take"])
"""Ops that read integers, or bools, as places and not as numbers."""
BEGINS_INSIDE = "_dynamic"
"""Suffix of the integer ops that take floats: they quantize inside."""
NARROW = (torch.int8, torch.uint8, torch.int16)


@dataclass(frozen=True, eq=False)
class Region:
    """Connected nodes of one graph that compute on integers, in graph order."""

    path: str
    """Of the graph: "" for the top one."""
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class StrayFloat:
    """A float tensor inside an integer region."""

    node: str
    """Its name; `branch/name` in a nested graph."""
    type: str
    why: str

    def __str__(self) -> str:
        return f"{self.node} : {self.type}: {self.why}"


def integer_regions(program: Program) -> tuple[Region, ...]:
    """Integer regions of a program, ordered by their first node."""
    return tuple(region for path, graph in program.graphs() for region in _Graph(path, graph).regions())


def stray_floats(program: Program) -> list[StrayFloat]:
    """Float tensors inside integer regions, except between an exact sum and its rounding."""
    return [stray for path, graph in program.graphs() for stray in _Graph(path, graph).strays()]


def check_integer_form(program: Program) -> None:
    """Raise a VerifyError that lists every stray float and every remaining Q/DQ op."""
    faults = [str(stray) for stray in stray_floats(program)]
    left = [node for node in program.nodes() if _is_qdq(node)]
    faults += [f"{program.describe(node)} is {node.target}, which the integer form spells out" for node in left]
    if faults:
        raise VerifyError(
            f"{program.name} is not all integers: {len(faults)} faults",
            faults,
            where=f"stage {program.stage.label}",
            advice="correct the reference, or the way the op is written, that the first fault comes from",
        )


@dataclass
class _Graph:
    """One graph, gone through once from its inputs to its output."""

    path: str
    graph: fx.Graph
    above: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Nodes that hang together, as trees."""
    seeds: set[fx.Node] = field(default_factory=set)
    rounded: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Integer-valued floats, with the value they are rounded from."""
    leaving: dict[fx.Node, str] = field(default_factory=dict)
    """Floats that are not yet numbers of the model: integers "cast" to float or "centered", and those once "scaled"."""
    suspects: list[tuple[fx.Node, fx.Node, str]] = field(default_factory=list)
    """A float, the node of a region it would be inside of, and what is wrong with it."""

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder" and self.path and _dtype(node) in NARROW:
                self._join(node)
                self.seeds.add(node)
            if node.op == "output" and self.path:
                self.seeds |= {
                    value for value in node.all_input_nodes if value in self.above and _dtype(value) in NARROW
                }
            if node.op not in ("call_function", "output"):
                continue
            if node.op == "call_function" and self._is_inside(node):
                self._join(node)
            self._judge(node)

    def regions(self) -> Iterator[Region]:
        live = {self._top(seed) for seed in self.seeds}
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node in self.above and self._top(node) in live:
                found.setdefault(self._top(node), []).append(node)
        return (Region(self.path, tuple(nodes)) for nodes in found.values())

    def strays(self) -> Iterator[StrayFloat]:
        live = {self._top(seed) for seed in self.seeds}
        told: set[fx.Node] = set()
        for node, inside, why in self.suspects:
            if inside in self.above and self._top(inside) in live and node not in told:
                told.add(node)
                yield StrayFloat(f"{self.path}/{node.name}".lstrip("/"), str(type_of(node)), why)

    # -- what hangs together ---------------------------------------------------------------------------------

    def _is_inside(self, node: fx.Node) -> bool:
        """True if a node can be part of a region: an integer op, or anything that yields integers or float64."""
        dtype = _dtype(node)
        if op_of(node.target) is not None or node.target is out_dtype:
            self.seeds.add(node)
            return True
        return dtype is not None and (not dtype.is_floating_point or dtype == torch.float64) and not dtype.is_complex

    def _join(self, node: fx.Node) -> None:
        self.above[node] = node
        for operand in node.all_input_nodes:
            # an op that ends in float is the end of its region
            if operand in self.above and not _is_float(operand):
                self.above[self._top(operand)] = self._top(node)

    def _top(self, node: fx.Node) -> fx.Node:
        while self.above[node] is not node:
            self.above[node] = self.above[self.above[node]]
            node = self.above[node]
        return node

    # -- what is wrong ---------------------------------------------------------------------------------------

    def _judge(self, node: fx.Node) -> None:
        op, dtype = op_of(node.target), _dtype(node)
        self._judge_leaving(node)
        if op is not None:
            self._judge_operands(node, op)
        elif dtype is None or _hands_on(node):
            return
        elif dtype == torch.float64:
            self._judge_multiplier(node)
        elif dtype.is_floating_point:
            self._judge_exit(node)
        elif dtype != torch.bool:
            self._judge_entry(node)
        if dtype is not None and dtype.is_floating_point:
            self._follow_rounding(node)

    def _judge_operands(self, node: fx.Node, op: IntegerOp) -> None:
        """An integer op reads integers and constants of float64; one that ends in float, any constants."""
        if op.name.endswith(BEGINS_INSIDE):
            return
        for operand in node.all_input_nodes:
            dtype = _dtype(operand)
            if dtype is None or not dtype.is_floating_point:
                continue
            if operand.op != "get_attr":
                self._suspect(operand, node, f"{op.name} {node.name} reads it, which is no constant")
            elif dtype != torch.float64 and not _is_float(node):
                self._suspect(operand, node, f"{op.name} {node.name} is given it, where multipliers are float64")

    def _judge_multiplier(self, node: fx.Node) -> None:
        """Float64 in a region: only what leads from an exact sum to its rounding."""
        if _schema(node) not in MULTIPLIER:
            self._suspect(node, node, f"{op_name(node)} is not what a multiplier goes through")

    def _judge_exit(self, node: fx.Node) -> None:
        """Float from integers: a result in float32, or the first op of a dequantize."""
        name = _schema(node)
        for operand in node.all_input_nodes:
            dtype = _dtype(operand)
            if operand not in self.above or dtype in (None, torch.bool) or _is_float(operand):
                continue
            if dtype == torch.float64:
                if name != "to":
                    self._suspect(node, operand, f"{op_name(node)} reads float64 that was not rounded")
            elif name == "to":
                self.leaving[node] = "cast"
            elif (name in INDEXING and operand is not node.args[0]) or _adds_zero_point(node, operand):
                continue
            elif not (name == "mul" and any(_is_float(factor) for factor in node.all_input_nodes)):
                self._suspect(node, operand, f"{op_name(node)} makes floats of integers")

    def _judge_leaving(self, node: fx.Node) -> None:
        """Integers that were cast to float are a zero point and a scale away from being numbers of the model."""
        for operand in node.all_input_nodes:
            state = self.leaving.get(operand)
            if state not in ("cast", "centered"):
                continue
            name = _schema(node)
            if name == "mul":
                self.leaving[node] = "scaled"
            elif name == "sub" and state == "cast":
                self.leaving[node] = "centered"
            elif name == "to" and _is_float(node):
                self.leaving[node] = state
            else:
                source = operand if state == "cast" else operand.all_input_nodes[0]
                self._suspect(operand, source.all_input_nodes[0], f"{op_name(node)} reads it before it has its scale")

    def _judge_entry(self, node: fx.Node) -> None:
        """Integers from float: a cast of a rounded value."""
        for operand in node.all_input_nodes:
            dtype = _dtype(operand)
            if dtype is None or not dtype.is_floating_point:
                continue
            if _schema(node) == "to" and operand in self.rounded:
                self.seeds.add(node)
                self._judge_rescaling(node, self.rounded[operand])
            elif _schema(node) == "to":
                self._suspect(operand, node, "it is made integers without rounding")
            elif operand in self.above:
                self._suspect(operand, node, f"{op_name(node)} makes integers of it")

    def _judge_rescaling(self, node: fx.Node, source: fx.Node) -> None:
        """Flag rounding of integers that were cast to float32 and multiplied once."""
        if self.leaving.get(source) == "scaled":
            self._suspect(source, node, "integers are rescaled in it, where the multiplier is float64")

    def _follow_rounding(self, node: fx.Node) -> None:
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            return
        name = _schema(node)
        if name == "round":
            self.rounded[node] = _product_of(first)
        elif name in MOVES | SHIFTS and first in self.rounded:
            self.rounded[node] = self.rounded[first]

    def _suspect(self, node: fx.Node, inside: fx.Node, why: str) -> None:
        self.suspects.append((node, inside, why))


def _adds_zero_point(node: fx.Node, zero_point: fx.Node) -> bool:
    """True if a node adds a run-time zero point to a number that is being quantized."""
    number = node.args[0] if node.args else None
    return (
        _schema(node) == "add"
        and isinstance(number, fx.Node)
        and number is not zero_point
        and _schema(number) in ("round", "mul")
        and _is_float(number)
    )


def _product_of(node: fx.Node) -> fx.Node:
    """Operand of a rounding, without a zero point added before."""
    first = node.args[0] if node.args else None
    return first if _schema(node) == "add" and isinstance(first, fx.Node) else node


def _hands_on(node: fx.Node) -> bool:
    """True if a node is exempt from dtype checks: it picks an item, runs another graph, is the output, or is a Q/DQ op."""
    target: Any = node.target
    runs_graph = isinstance(target, HigherOrderOperator) and target is not out_dtype
    return node.op == "output" or target is operator.getitem or runs_graph or _is_qdq(node)


def _is_qdq(node: fx.Node) -> bool:
    return is_quantize(node) or is_dequantize(node) or is_choice(node)


def _schema(node: fx.Node) -> str:
    """The name of the op that a node calls: `add` for `aten.add.Tensor`."""
    target: Any = node.target
    return short_name(target) if isinstance(target, OpOverload) else str(target)


def _dtype(node: fx.Node) -> torch.dtype | None:
    """Dtype of a node's value; of several tensors, that of the first."""
    kind = type_of(node)
    if isinstance(kind, TupleType) and kind.items:
        kind = kind.items[0]
    return kind.dtype if isinstance(kind, TensorType) else None


def _is_float(node: fx.Node) -> bool:
    """True if a node yields floats of the model, not of a multiplier."""
    dtype = _dtype(node)
    return dtype is not None and dtype.is_floating_point and dtype != torch.float64


__all__ = ["Region", "StrayFloat", "check_integer_form", "integer_regions", "stray_floats"]
