"""Carry the plan out: quantize and dequantize ops around what it says."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from quantc.inserted import remove_observers
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.integer.writers.recurrent import state_notes
from quantc.pipeline import Outcome, Pass, Preserves
from quantc.places import Places, after, rewire
from quantc.plan import Group, Source
from quantc.program import Program, Stage
from quantc.qdq import Scales, scales_for
from quantc.scales import find_qparams, spec_of
from quantc.sites import Site


class QuantizePass(Pass):
    """Put quantize and dequantize ops (`quantized_decomposed`) where the plan says.

    A tensor that its op yields quantized is read dequantized by everyone. One that only some readers want quantized
    is so for them alone. A reader that wants another scale than the tensor comes with gets it requantized. The scales
    come from the statistics of calibration, and from the weights themselves.

    With `reduce_range` weight scales grow, or activations end earlier, wherever two products could otherwise leave the
    16 bits in which the backend's instruction set adds them: see docs/overflow.md.
    """

    name: ClassVar[str] = "quantize"
    needs: ClassVar[Stage] = Stage.CALIBRATED
    gives: ClassVar[Stage | None] = Stage.QUANTIZED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    reduce_range: RangeReduction = "auto"
    """What is made narrower where pairs of products could overflow: "weights", "activations", or "no", nothing; "auto" is
    what the backend's instruction set needs."""

    def run(self, program: Program) -> Outcome:
        remove_observers(program)
        qparams, notes = find_qparams(program, self.reduce_range)
        program.plan.qparams = qparams
        writer = _Writer(program)
        for group in program.plan.groups:
            writer.add(group)
        count = writer.write()
        program.note_inference_only("it was quantized with fixed scales")
        return Outcome(count > 0, (f"{count} tensors quantized", *notes, *state_notes(program)))


class _Writer:
    """Collects who yields and who reads which tensor in which form; then writes the ops, and each reader once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.places = Places(program)
        self.yields: dict[fx.Node, Scales] = {}
        self.wants: dict[fx.Node, dict[int, Scales]] = {}
        """By reader, then by operand."""
        self.tensors: set[fx.Node] = set()

    def add(self, group: Group) -> None:
        values = {site: self.places.value(site) for site in group.places}
        first = values[group.places[0]]
        hint = str(first.target) if first.op == "get_attr" else first.name
        qparams = None if group.source is Source.RUN_TIME else self.program.plan.qparams[group.name]
        scales = scales_for(self.program, hint, qparams, spec_of(group, qparams))
        for site, value in values.items():
            self._note(site, value, scales)

    def _note(self, site: Site, value: fx.Node, scales: Scales) -> None:
        self.tensors.add(value)
        if site.operand is None:
            self.yields[value] = scales
        else:
            self.wants.setdefault(self.places.node(site), {})[site.operand] = scales

    def write(self) -> int:
        changes: dict[fx.Node, dict[int, fx.Node]] = {}
        values = [node for graph in self.places.paths for node in graph.nodes if node in self.tensors]
        reads = {value: self.places.reads(value) for value in values}  # as it was before any op is added
        for value in values:
            self._write_one(value, reads[value], changes)
        for reader, operands in changes.items():
            rewire(self.program, reader, operands)
        return len(self.tensors)

    def _write_one(
        self, value: fx.Node, reads: list[tuple[fx.Node, int]], changes: dict[fx.Node, dict[int, fx.Node]]
    ) -> None:
        before = after(value)
        own = self.yields.get(value)
        source = value
        forms: dict[int, fx.Node] = {}
        if own is not None:
            source = forms[id(own)] = own.dequantize(own.quantize(value, before=before), before=before)
        for reader, operand in reads:
            scales = self.wants.get(reader, {}).get(operand, own)
            if scales is None:
                continue
            if id(scales) not in forms:
                forms[id(scales)] = scales.dequantize(scales.quantize(source, before=before), before=before)
            changes.setdefault(reader, {})[operand] = forms[id(scales)]
