"""The error of a whole program's outputs before a pass and after it, on batches that nothing was fitted to.

Layers that are better one by one may make a program that is worse: errors of neighbours cancel, and a layer's power says
little about what its readers need. A pass that does is undone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from quantc.calibration.graph_observers import show_observers
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.batch_inputs import leaves_of
from quantc.ir.program import Program
from quantc.ir.sites import Site
from quantc.recover.float_choice import Data
from quantc.recover.judging_batches import BATCHES
from quantc.recover.simulation import Left, Simulation
from quantc.spec.halves import Halves
from quantc.spec.observation import Observation

MAX_LOSS = 0.2
"""Decibels that a pass may lose: less is chance on a few batches."""


@dataclass(frozen=True, eq=False)
class WholeProgram:
    """A calibrated program as it was, to compare it with what a pass makes of it."""

    program: Program
    reduce_range: RangeReduction
    data: Data
    error: float

    @staticmethod
    def of(program: Program, reduce_range: RangeReduction = "auto") -> WholeProgram | None:
        """The program as it is now; None without batches to judge on."""
        judging = [leaves_of(program, batch, number) for number, batch in enumerate(BATCHES.get()) if number % 2]
        if not judging:
            return None
        simulation = Simulation.of(program, reduce_range)
        data = Data.of(simulation, judging)
        return WholeProgram(program, reduce_range, data, _error(simulation, data))

    def fault(self) -> str | None:
        """The loss that the pass made; None if there is none to speak of."""
        after = _error(Simulation.of(self.program, self.reduce_range), self.data)
        if not after > self.error * 10 ** (MAX_LOSS / 10):
            return None
        return f"the whole program has {_decibels(after)} with it and {_decibels(self.error)} without, on other batches"


@dataclass(frozen=True, eq=False)
class Facts:
    """What fitting and transforms change in a plan."""

    statistics: dict[str, Observation]
    collected: dict[str, Halves]
    fitted: dict[Site, Tensor]
    fitted_to: dict[Site, str]

    @staticmethod
    def of(program: Program) -> Facts:
        plan = program.plan
        return Facts(dict(plan.statistics), dict(plan.collected), dict(plan.fitted), dict(plan.fitted_to))

    def restore(self, program: Program) -> None:
        plan = program.plan
        plan.statistics, plan.collected = self.statistics, self.collected
        plan.fitted, plan.fitted_to = self.fitted, self.fitted_to
        show_observers(program)


def _error(simulation: Simulation, data: Data) -> float:
    return simulation.error(data.batches, data.expected, Left())


def _decibels(error: float) -> str:
    return f"{-10 * math.log10(error):.1f} dB" if error > 0 else "no error"
