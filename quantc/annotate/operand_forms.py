"""The form of a node's operands: 8-bit integers, or floats."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.integer.library import NAMESPACE
from quantc.ir.plan import spec_of
from quantc.ir.program import Program, Stage
from quantc.ir.site_index import Places, operand_nodes
from quantc.ir.sites import Site
from quantc.ir.types import dtype_of
from quantc.qdq.ops import belongs_to_qdq, is_dequantize, is_layout
from quantc.spec.formats import Timing

BYTES = (torch.int8, torch.uint8)


class Forms:
    """Operand forms, from the graph of a quantized program, and from the plan before."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def reads_bytes(self, node: fx.Node, value: fx.Node | None) -> bool:
        """True if a node reads `value` as 8-bit integers at every operand."""
        if value is None:
            return False
        if self.program.stage >= Stage.LOWERED:
            return self._is_of_bytes(value)
        if self.program.stage >= Stage.QUANTIZED:
            return is_dequantize(value) and dtype_of(value.args[0]) in BYTES
        places = self._places
        uses = [places.use(node, index) for index, operand in enumerate(operand_nodes(node)) if operand is value]
        out = places.out(value)
        # the consumer's own decision takes precedence over the producer's
        return bool(uses) and all((use if use in self._planned else out) in self._stored for use in uses)

    def _is_of_bytes(self, value: fx.Node) -> bool:
        """True if a tensor of the integer form has 8 bits, or is an intermediate step of one op on such a tensor."""
        claims = self.program.plan.claims
        while dtype_of(value) not in BYTES:
            kind, inputs = dtype_of(value), value.all_input_nodes
            is_own = isinstance(value.target, OpOverload) and value.target.namespace == NAMESPACE
            if kind is None or kind.is_floating_point or value in claims or is_own or not inputs:
                return False  # quantc's ops yield another grid, in more bits
            value = inputs[0]
        return True

    def is_quantized(self, node: fx.Node) -> bool:
        """True if a rule claimed a node or, without recorded claims, it reads a dequantized tensor."""
        claims = self.program.plan.claims
        return node in claims or (not claims and bool(self._dequantized(node)))

    def timing(self, node: fx.Node) -> Timing:
        """The technique of a node, read from the graph of the Q/DQ form."""
        read = self._dequantized(node)
        if any(belongs_to_qdq(scale) for value in read for scale in value.all_input_nodes[1:]):
            return Timing.DYNAMIC
        stored = [value.all_input_nodes[0].op == "get_attr" for value in read]
        return Timing.WEIGHT_ONLY if all(stored) else Timing.STATIC

    @staticmethod
    def _dequantized(node: fx.Node) -> list[fx.Node]:
        """The dequantize ops that a node reads, through ops that restore a weight's shape."""
        found: list[fx.Node] = []
        for value in node.all_input_nodes:
            while is_layout(value):
                value = value.all_input_nodes[0]
            found += [value] if is_dequantize(value) else []
        return found

    @cached_property
    def _places(self) -> Places:
        return Places(self.program)

    @cached_property
    def _planned(self) -> set[Site]:
        """The sites in the groups of the plan."""
        return {site for group in self.program.plan.groups for site in group.places}

    @cached_property
    def _stored(self) -> set[Site]:
        """The sites whose tensors are stored as 8-bit integers."""
        groups = [group for group in self.program.plan.groups if spec_of(group).dtype.storage in BYTES]
        return {site for group in groups for site in group.places}
