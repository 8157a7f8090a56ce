"""Inserts Q/DQ ops into a graph by its plan: each tensor is converted once for each form it is produced or read in."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from quantc.ir.plan import Group
from quantc.ir.program import Program
from quantc.ir.site_index import Places, after, rewire
from quantc.ir.sites import Site
from quantc.qdq.ops import Scales


class PlanWriter:
    """Collects producers and consumers of each quantized tensor; then inserts the ops, and rewires each consumer once.

    `scales_of` gives the quantization of a group, with a name hint for its constants.
    """

    def __init__(self, program: Program, scales_of: Callable[[Group, str], Scales]) -> None:
        self.program = program
        self.scales_of = scales_of
        self.places = Places(program)
        self.yields: dict[fx.Node, Scales] = {}
        self.wants: dict[fx.Node, dict[int, Scales]] = {}
        """By consumer, then by operand index."""
        self.tensors: set[fx.Node] = set()

    def write(self) -> int:
        """Carry the plan out; returns the number of tensors it covers."""
        for group in self.program.plan.groups:
            self._add(group)
        changes: dict[fx.Node, dict[int, fx.Node]] = {}
        values = [node for graph in self.places.paths for node in graph.nodes if node in self.tensors]
        reads = {value: self.places.reads(value) for value in values}  # before any op is inserted
        for value in values:
            self._write_one(value, reads[value], changes)
        for reader, operands in changes.items():
            rewire(self.program, reader, operands)
        return len(self.tensors)

    def _add(self, group: Group) -> None:
        values = {site: self.value(site) for site in group.places}
        first = values[group.places[0]]
        hint = str(first.target) if first.op == "get_attr" else first.name
        scales = self.scales_of(group, hint)
        for site, value in values.items():
            self.note(site, value, scales)

    def value(self, site: Site) -> fx.Node:
        """The node that produces the tensor at a site."""
        return self.places.value(site)

    def note(self, site: Site, value: fx.Node, scales: Scales) -> None:
        """Record the quantization of the tensor at a site."""
        self.tensors.add(value)
        if site.operand is None:
            self.yields[value] = scales
        else:
            self.wants.setdefault(self.places.node(site), {})[site.operand] = scales

    def yielded(self, value: fx.Node, own: Scales, *, before: fx.Node) -> fx.Node:
        """The quantized and dequantized tensor that consumers read where the producer's output is quantized."""
        return own.dequantize(own.quantize(value, before=before), before=before)

    def _write_one(
        self, value: fx.Node, reads: list[tuple[fx.Node, int]], changes: dict[fx.Node, dict[int, fx.Node]]
    ) -> None:
        before = after(value)
        own = self.yields.get(value)
        source = value
        forms: dict[int, fx.Node] = {}
        wanted = [(reader, operand, self.wants.get(reader, {}).get(operand, own)) for reader, operand in reads]
        finer = {id(scales) for _, _, scales in wanted if _is_finer(scales, own)}
        if own is not None:
            source = forms[id(own)] = self.yielded(value, own, before=before)
        for reader, operand, scales in wanted:
            if scales is None:
                continue
            if id(scales) in finer and id(scales) not in forms:  # more bits than produced: quantize the float value
                forms[id(scales)] = scales.dequantize(scales.quantize(value, before=before), before=before)
            elif id(scales) not in forms:
                forms[id(scales)] = scales.dequantize(scales.quantize(source, before=before), before=before)
            changes.setdefault(reader, {})[operand] = forms[id(scales)]


def _is_finer(wanted: Scales | None, own: Scales | None) -> bool:
    """True if a consumer asks for more bits than the tensor is produced in."""
    if wanted is None or own is None or wanted is own:
        return False
    formats = wanted.spec.dtype, own.spec.dtype
    return not any(each.is_float for each in formats) and formats[0].bits > formats[1].bits
