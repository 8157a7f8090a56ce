"""Observation of some ranges anew, after what makes them has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quantc.calibration.accumulator import Tally
from quantc.calibration.calibration_report import batch_count
from quantc.calibration.graph_observers import show_observers
from quantc.calibration.interpreter import Runner
from quantc.calibration.state_isolation import Isolation
from quantc.errors import CalibrationError, QuantcError
from quantc.ir.batch_inputs import leaves_of, samples_in
from quantc.ir.program import Program


def observe_again(program: Program, batches: Iterable[Any], names: Sequence[str]) -> str:
    """Replace the statistics of some groups of a calibrated program, by name, with those of batches. Says what was done."""
    tally = Tally(program, {}, only=set(names))
    runner, isolation = Runner(program, tally.watchers()), Isolation(program)
    for number, batch in enumerate(batches):
        leaves = leaves_of(program, batch, number)
        tally.begin(number)
        try:
            with isolation.batch(number, leaves) as inputs:
                runner.run(inputs)
        except QuantcError as error:
            error.where = f"batch {number}, {error.where}" if error.where else f"batch {number}"
            raise
        tally.commit(samples_in(leaves))
    seen, known = tally.whole.batches, program.plan.batches
    if not seen:
        raise CalibrationError(
            "there are no batches to observe ranges with that have changed",
            where=program.name,
            advice="give batches that can be gone through again, such as a list",
        )
    program.plan.statistics.update(tally.whole.totals)
    show_observers(program)
    other = "" if seen == known else f", where the others have seen {batch_count(known)}"
    return f"observed {len(names)} ranges again, with {batch_count(seen)}{other}"
