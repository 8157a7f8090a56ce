"""Redundant dequantize/quantize pairs of a lowered module: tensors that become float only to be rounded again.

Within a region, from one quantized op to the next, only 8-bit tensors should be passed. Tensors found here could have
stayed 8-bit: the ops on both sides support it, and those between only move values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import fx

from quantc.integer.grid import Grid, grid_of
from quantc.integer.library import op_of
from quantc.ir.dialect import traits_of
from quantc.ir.op_row import Trait
from quantc.ir.placements import StandIn
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.lowered import Lowered

BYTES = (torch.uint8, torch.int8)


class Kind(StrEnum):
    """Kind of redundancy."""

    PAIR = "is dequantized, moved at most, and quantized again"
    ENDING = "ends in float, and everything that reads it rounds it onto one grid"
    TWICE = "is rounded twice onto one grid"


@dataclass(frozen=True, slots=True)
class LoosePair:
    """A tensor that need not have been float."""

    kind: Kind
    source: str
    """The node that makes it float, by its name in the program."""
    quantizer: str
    """The node that rounds it again."""

    def __str__(self) -> str:
        return f"{self.source} {self.kind}, by {self.quantizer}"


def loose_pairs(lowered: Lowered) -> tuple[LoosePair, ...]:
    """Tensors of the lowered module that become float between two quantized ops without need."""
    program = lowered.program
    graphs = [
        (path.replace(".", "/"), module)
        for path, module in lowered.module.named_modules()
        if isinstance(module, fx.GraphModule)
    ]
    return tuple(pair for path, module in graphs for pair in _Graph(lowered, program, path, module).pairs())


@dataclass
class _Graph:
    """One graph of a running module, its nodes looked at as what they stand for."""

    lowered: Lowered
    program: Program
    path: str
    module: fx.GraphModule
    origins: dict[str, fx.Node] = field(init=False)
    light: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    """Floats that have been moved at most since they were bytes, with the nodes that made them float."""

    def __post_init__(self) -> None:
        self.origins = {node.name: node for node in self.program.nodes()}
        for node in self.module.graph.nodes:
            found = self._roots(node)
            if found:
                self.light[node] = found

    def pairs(self) -> Iterator[LoosePair]:
        seen: dict[fx.Node, list[tuple[fx.Node, Grid]]] = {}
        for node in self.module.graph.nodes:
            origin = self._quantize(node)
            if origin is None:
                continue
            source, grid = node.all_input_nodes[0], grid_of(self.program, origin)
            for root in sorted(self.light.get(source, ()), key=str):
                kind = Kind.PAIR if self._is_dequantize(root) else Kind.ENDING
                if kind is Kind.PAIR or self._is_rounded_once(root):
                    yield LoosePair(kind, str(self._name(root)), origin.name)
            others = seen.setdefault(source, [])
            if grid is not None and any(grid.equals(other) for _, other in others):
                yield LoosePair(Kind.TWICE, str(self._name(source)), origin.name)
            if grid is not None:
                others.append((node, grid))

    def _origin(self, node: fx.Node) -> fx.Node | None:
        """The node of the program whose op a node of the running module carries out."""
        is_kernel = node.op == "call_module" and isinstance(self.module.get_submodule(str(node.target)), Kernel)
        name = self._name(node)
        if is_kernel or name != node.name:
            return self.origins.get(name) if isinstance(name, str) else None
        return node if node.op == "call_function" else None

    def _name(self, node: fx.Node) -> StandIn:
        return self.lowered.stands_for(node, self.path)

    def _quantize(self, node: fx.Node) -> fx.Node | None:
        """The quantize op that a node carries out, and nothing else: a product that rounds its result is none."""
        origin = self._origin(node)
        if origin is None or not is_quantize(origin) or not node.all_input_nodes:
            return None
        source = origin.all_input_nodes[0]
        expected = self._name(source) if origin is node else source.name
        return origin if self._name(node.all_input_nodes[0]) == expected else None

    def _roots(self, node: fx.Node) -> frozenset[fx.Node]:
        """The nodes that made floats of bytes, if nothing but moving has come after; else none."""
        origin = self._origin(node)
        if origin is None:
            return frozenset()
        if self._is_dequantize(node) or _ends_in_float(origin):
            return frozenset({node})
        moves = Trait.PRESERVES_VALUES in traits_of(origin) or origin.target is operator.getitem
        if not moves or not node.all_input_nodes:
            return frozenset()
        floats = [operand for operand in node.all_input_nodes if _is_float(operand)]
        found = [self.light.get(operand, frozenset[fx.Node]()) for operand in floats]
        return frozenset[fx.Node]().union(*found) if all(found) else frozenset()

    def _is_dequantize(self, node: fx.Node) -> bool:
        origin = self._origin(node)
        return origin is not None and is_dequantize(origin) and origin.all_input_nodes[0].op != "get_attr"

    def _is_rounded_once(self, root: fx.Node) -> bool:
        """True if all users of a float, moved or not, round it onto one grid."""
        grids: list[Grid] = []
        pending = [root]
        while pending:
            for reader in pending.pop().users:
                origin = self._quantize(reader)
                if origin is not None:
                    grid = grid_of(self.program, origin)
                    if grid is None:
                        return False
                    grids.append(grid)
                elif reader in self.light:
                    pending.append(reader)
                else:
                    return False
        return bool(grids) and all(grid.equals(grids[0]) for grid in grids)


def _ends_in_float(origin: fx.Node) -> bool:
    """True if an op of the integer form reads 8-bit tensors and yields float."""
    reads = [
        kind for node in origin.all_input_nodes if (kind := tensor_type(node)) is not None and node.op != "get_attr"
    ]
    return op_of(origin.target) is not None and _is_float(origin) and any(kind.dtype in BYTES for kind in reads)


def _is_float(node: fx.Node) -> bool:
    kind = tensor_type(node)
    return kind is not None and kind.dtype.is_floating_point


__all__ = ["Kind", "LoosePair", "loose_pairs"]
