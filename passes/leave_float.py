"""Ops left float whose own grids lose more than that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

from pydantic import Field

from quantc.annotate.quantizer import Quantizer
from quantc.calibration.checkpoint import notes_for
from quantc.calibration.reuse_statistics import use_statistics
from quantc.config.config import QuantConfig
from quantc.errors import QuantcError
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.batch_inputs import leaves_of
from quantc.ir.decisions import Float
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program, Stage
from quantc.observe.store import Statistics
from quantc.observe.trained import Trained
from quantc.passes.annotate import Annotate
from quantc.passes.share import Share
from quantc.pipeline.base_pass import Outcome, Pass, Preserves
from quantc.recover.fitting import TELL
from quantc.recover.float_choice import Choice, Data, Limits, choose
from quantc.recover.judging_batches import BATCHES
from quantc.recover.simulation import Simulation

BY = "leave-float: its own grid loses more than float costs"
"""The reason in coverage."""


class LeaveFloat(Pass):
    """Leave ops float whose own grids lose more accuracy than leaving them float costs in time.

    All ops but the large products are candidates. On the even batches they are left float all at once, and then put back on
    their grids, the least harmful first, as long as the result stays within 0.5 dB of the best. On the odd batches the
    choice must gain `gain` dB, and each op on its own something. It takes one run of a batch for each candidate.

    The choice is a rule of the plan's config, one for each op. It needs batches: `qc.recover(prepared, passes,
    batches=...)`, and `qc.quantize`, which has them.
    """

    name: ClassVar[str] = "leave-float"
    needs: ClassVar[Stage] = Stage.SHARED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    gain: float = Field(default=1.0, gt=0)
    """Decibels that the whole program must gain."""
    elements: float = Field(default=0.5, ge=0, le=1)
    """Share of the elements that quantized ops yield which may become float."""
    macs: float = Field(default=0.05, ge=0, le=1)
    """Share of the multiply-adds which may become float."""
    reduce_range: RangeReduction = "auto"
    """The `reduce_range` that the program will be converted with."""

    def run(self, program: Program) -> Outcome:
        if any(entry.name.startswith(self.name) and entry.changed for entry in program.log):
            return Outcome(False, ("it has run: more ops would exceed what they may cost",))
        batches = BATCHES.get()
        if (reason := _why_not(program, len(batches))) is not None:
            return Outcome(False, (reason,))
        simulation = Simulation.of(program, self.reduce_range)
        leaves = [leaves_of(program, batch, index) for index, batch in enumerate(batches)]
        fit, judge = (Data.of(simulation, leaves[half::2]) for half in (0, 1))
        choice = choose(simulation, Limits(self.gain, self.elements, self.macs), fit, judge, TELL.get())
        if not choice.left:
            return Outcome(False, choice.notes, choice.judgments)
        if (fault := _leave(program, choice)) is not None:
            return Outcome(False, (fault,), (Judgment(program.name, "refused", reason=fault),))
        return Outcome(True, choice.notes, choice.judgments)


def _why_not(program: Program, batches: int) -> str | None:
    if program.plan.quantizer is None:
        return "the quantizer that annotated the program is not here to annotate it anew"
    if batches < 2:
        return "it takes two batches at least, to choose on and to judge on: qc.recover(prepared, passes, batches=...)"
    return None


def _leave(program: Program, choice: Choice) -> str | None:
    """Annotate anew, with the ops left float; the statistics stay. The reason, and the old plan, where that fails."""
    before = program.plan
    nodes = {node.name: BY for each in choice.left for node in each.nodes}
    notes = notes_for(program, before.batches, None)
    observed = {name: found for name, found in before.statistics.items() if name in notes["groups"]}
    saved = Statistics(observed, notes, dict(before.collected))
    trained = {name: found for name, found in before.statistics.items() if isinstance(found, Trained)}
    try:
        Annotate(backend=cast(Quantizer, before.quantizer), config=_with_floats(before.config, nodes)).run(program)
        Share().run(program)
        use_statistics(program, saved)
    except QuantcError as error:
        program.plan = before
        return f"{error.what}; {error.advice}"
    plan = program.plan
    names = {group.name for group in plan.groups}
    plan.statistics |= {name: found for name, found in trained.items() if name in names}
    plan.fitted = {site: found for site, found in before.fitted.items() if site.graph or site.node not in nodes}
    plan.fitted_to = {site: found for site, found in before.fitted_to.items() if site in plan.fitted}
    return None


def _with_floats(config: QuantConfig | None, nodes: Mapping[str, str]) -> QuantConfig:
    found = config if config is not None else QuantConfig()
    for name, reason in nodes.items():
        found = found.set_node(name, Float(reason))
    return found
