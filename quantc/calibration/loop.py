"""Calibration loop: runs batches through a prepared program and collects the statistics its plan asks for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from quantc.calibration.accumulator import FirstNotFinite, NotFiniteError, Tally, Whole
from quantc.calibration.calibration_report import CalibrationReport, batch_count, rows_of
from quantc.calibration.checkpoint import Checkpoint, notes_for, plan_digest, program_digest
from quantc.calibration.collect import Collect, Collection, collection_of
from quantc.calibration.collector import Collector, gradients_of, watching
from quantc.calibration.distributed import Shard, Team, team_for
from quantc.calibration.graph_observers import read_observers, show_observers
from quantc.calibration.interpreter import Runner
from quantc.calibration.state_isolation import Isolation
from quantc.calibration.underflow import COARSE, coarse_groups
from quantc.errors import CalibrationError, QuantcError, SaveError
from quantc.files.atomic_file import check_writable
from quantc.files.regular_file import as_path
from quantc.ir.batch_inputs import Inputs, check_batches, leaves_of, samples_in, select_inputs
from quantc.ir.program import LogEntry, Program, Stage, check_has_plan, check_program
from quantc.observe.store import Statistics, Withheld
from quantc.spec.observation import Observation, Order
from quantc.support.finite_tensors import count_not_finite, why_not_finite
from quantc.support.progress import Style, Told, show_progress

EVERY = 16
_END = object()


def calibrate(
    prepared: Program,
    batches: Iterable[Any],
    *,
    inputs: Inputs | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = EVERY,
    progress: Style | Told = "auto",
    shard: Shard = "auto",
    collect: Collect | str | Sequence[str] | None = None,
) -> CalibrationReport:
    """Run batches through a prepared program and collect the statistics for its scales.

    `batches` is any iterable; it is consumed once, one batch at a time. A batch is a tuple or list of the model's
    arguments, a dict of them by name, or its one argument. Where it holds more, such as labels, `inputs` selects the
    model's inputs: `inputs=0`, `inputs="image"`, `inputs=("ids", "mask")`, or a function of the batch. Batches may be
    of any size that the program takes. Calling again adds to the statistics. Nothing else about the program changes:
    buffers it writes are restored after each batch.

    With `checkpoint`, the statistics are written to that file every `every` batches and whenever the calibration ends,
    however it does. Started again with the same file and the same data, it skips the batches that are in, and ends with
    the same bits as without interruption.

    `progress` is "auto" (a bar on a terminal, else nothing), "bar", "lines", "silent", or a function that gets the
    number of batches done, and the total if known. Under torchrun, or in any process group of torch.distributed, the
    data is sharded among the processes, and all end with the statistics of all: see
    `quantc.calibration.distributed.Shard`.

    `collect` names statistics for passes that fit weights to the data, collected in the same pass: "recover" for those of
    `qc.recover`, names such as `["gram", "reservoir{rows=64}"]`, or a `Collect` with limits. What they cost is said before
    the first batch, and refused above the limit. They go into `prepared.plan.collected`, of even and odd batches apart.

    NaN or infinity is an error that names the tensor and the batch. After an error, the statistics are those of the
    whole batches before it; with `checkpoint` they are in the file, and the program is as it was.
    """
    check_program(prepared, "calibrate", "prepared = qc.prepare(qc.capture(model, example_inputs), backend)")
    _check_prepared(prepared, every)
    check_batches(batches)
    batches = select_inputs(batches, inputs, prepared)
    read_observers(prepared)
    wanted = Collect.of(collect)
    collection = None if wanted is None else collection_of(prepared, wanted)
    title = f"calibrating {prepared.name}" + (f", collecting {collection}" if collection is not None else "")
    began = time.perf_counter()
    with team_for(shard) as team:
        _check_team(prepared, team, wanted)
        style = progress if team.rank == 0 else "silent"
        with show_progress(title, style) as told:
            run = _Run(prepared, team, _checkpoint(prepared, team, checkpoint, every, wanted), told, collection)
            if collection is not None:
                run.notes.append(f"collected {collection}")
            whole = run.all_of(batches)
    return finish(prepared, whole, time.perf_counter() - began, run.notes)


@dataclass
class _Run:
    """One call of `calibrate`."""

    program: Program
    team: Team
    checkpoint: Checkpoint | None
    told: Told
    collection: Collection | None = None
    notes: list[str] = field(default_factory=list)
    kept: int = 0
    """Number of batches in the checkpoint."""
    is_new: bool = field(init=False)
    """True if the statistics of the plan have no numbers to add to."""

    def __post_init__(self) -> None:
        statistics = self.program.plan.statistics
        # order-dependent observations continue from their state; all others are collected separately and merged at the end
        self.is_new = any(isinstance(seen, Withheld) for seen in statistics.values())
        kept = {} if self.is_new else statistics
        before = {name: seen for name, seen in kept.items() if seen.order is Order.MATTERS}
        self.tally = Tally(self.program, before)
        self.collector = Collector(self.program, self.collection, self.program.plan.batches)
        self.tally.whole = replace(self.tally.whole, collected=self.collector.totals)
        self.runner = Runner(self.program, watching(self.tally.watchers(), self.collector.watchers()))
        self.gradients = gradients_of(self.program, self.collector.taps)
        self.isolation = Isolation(self.program)

    def all_of(self, batches: Iterable[Any]) -> Whole:
        """Run all data, and store the statistics in the plan."""
        try:
            self._resume()
            self._feed_and_keep(batches)
        except Exception as error:
            if not self.team.is_single:
                _tell_failure(self.team, error)
            raise
        whole = self._of_the_team()
        self._into_plan(whole)
        return whole

    def _resume(self) -> None:
        resumed = self.checkpoint.read() if self.checkpoint is not None else None
        if resumed is None:
            return
        self.tally.whole, before = resumed
        self.collector.totals = dict(self.tally.whole.collected)
        self.tally.whole = replace(self.tally.whole, collected=self.collector.totals)
        self.kept = self.tally.whole.batches
        self.notes.append(f"{batch_count(self.kept)} from the checkpoint")
        threads = torch.get_num_threads()
        if before != threads:
            told = f"the checkpoint was written with {before} threads, and there are now {threads}"
            self.notes.append(f"{told}: the last bits may differ")

    def _feed_and_keep(self, batches: Iterable[Any]) -> None:
        try:
            self._feed(batches)
        except BaseException:
            # whole batches count; but those in a checkpoint are added when the calibration is resumed
            if self.checkpoint is None and self.team.is_single and not self.collector.is_torn:
                self._into_plan(self.tally.whole)
            raise
        finally:
            self._keep()

    def _feed(self, batches: Iterable[Any]) -> None:
        total = _length(batches, self.team)
        stream = self.team.share(iter(batches))
        self._skip(stream)
        self.told(self.kept, total)
        # no `for`: it would hold a batch while the next one is made
        while (batch := next(stream, _END)) is not _END:
            self._one(batch)
            del batch
            done = self.tally.whole.batches
            self.told(done, total)
            if self.checkpoint is not None and self.checkpoint.is_due(done):
                self._keep()

    def _skip(self, stream: Iterator[Any]) -> None:
        for index in range(self.kept):
            if next(stream, _END) is _END:
                raise CalibrationError(
                    f"the checkpoint has {batch_count(self.kept)}, and the data ended after {index}",
                    where=str(self.checkpoint.path) if self.checkpoint is not None else None,
                    advice="give the same data as before, or another checkpoint file",
                )

    def _one(self, batch: Any) -> None:
        number = self.team.number(self.tally.whole.batches)
        leaves = leaves_of(self.program, batch, number)
        self.tally.begin(self.collector.first + number)
        self.collector.begin(number)
        try:
            with self.isolation.batch(number, leaves) as inputs:
                self.runner.run(inputs)
            if self.gradients is not None:
                with self.isolation.batch(number, leaves) as inputs:
                    self.collector.hold_all(self.gradients.of(inputs, number))
        except QuantcError as error:
            place = f"batch {number}, {error.where}" if error.where else f"batch {number}"
            error.where = place
            if isinstance(error, NotFiniteError):
                self._tell_first(error, number, leaves)
            raise
        self.collector.commit()
        self.tally.commit(samples_in(leaves))
        self.collector.is_torn = False

    def _tell_first(self, error: NotFiniteError, number: int, leaves: list[Any]) -> None:
        """Say which op was the first to give NaN or infinity, as the one that is observed need not be, and which of its
        weights holds them."""
        search = FirstNotFinite(self.program)
        with self.isolation.batch(number, leaves) as inputs:
            node = search.run(inputs)
        if node is None:
            return
        error.where = f"{error.where}; the first to give one is {self.program.describe(node)}"
        for operand in node.all_input_nodes:
            weight = self.program.tensor(operand)
            is_mask = not isinstance(weight, torch.nn.Parameter)
            if weight is not None and why_not_finite(weight, may_be_infinite=is_mask) is not None:
                count = count_not_finite(weight)
                error.what = f"{error.what}, as {count} of {weight.numel()} values of {operand.target} are"
                error.advice = "correct the model: what it was trained or loaded with"
                return

    def _keep(self) -> None:
        whole = self.tally.whole
        if self.checkpoint is not None and whole.batches > self.kept and not self.collector.is_torn:
            self.checkpoint.write(whole)
            self.kept = whole.batches

    def _of_the_team(self) -> Whole:
        """Merged statistics of all processes."""
        own = self.tally.whole
        if self.team.is_single:
            return own
        notes = {"batches": own.batches, "samples": own.samples, "failed": None}
        packed = Statistics(own.totals, notes, own.collected).to_bytes()
        parts = [Statistics.from_bytes(part) for part in self.team.exchange(packed)]
        for rank, part in enumerate(parts):
            if part.notes["failed"] is not None:
                raise CalibrationError(
                    f"process {rank} failed: {part.notes['failed']}",
                    where=f"rank {rank} of {self.team.size}",
                    advice="correct what it complains of, and start all processes again",
                )
        merged = parts[0]
        for part in parts[1:]:
            merged = merged.merge(part)
        counts: list[Any] = [part.notes["samples"] for part in parts]
        self.notes.append(f"by {self.team.size} processes")
        batches = sum(part.notes["batches"] for part in parts)
        return Whole(merged.sites, batches, None if None in counts else sum(counts), merged.collected)

    def _into_plan(self, whole: Whole) -> None:
        plan = self.program.plan
        if not whole.batches:
            return
        if self.is_new:
            self.notes.append(f"started anew: the statistics of {batch_count(plan.batches)} were not in the text")
            plan.statistics, plan.batches, self.is_new = {}, 0, False
        for name, observation in whole.totals.items():
            before = plan.statistics.get(name)
            is_new = before is None or observation.order is Order.MATTERS
            plan.statistics[name] = observation if is_new or before is None else before.merge(observation)
        for name, halves in whole.collected.items():
            earlier = plan.collected.get(name)
            plan.collected[name] = halves if earlier is None else earlier.merge(halves)
        plan.batches += whole.batches
        show_observers(self.program)


def finish(prepared: Program, whole: Whole, seconds: float, notes: Sequence[str]) -> CalibrationReport:
    """Mark the program as calibrated, and report."""
    if not whole.batches:
        raise CalibrationError(
            "calibrated with zero batches",
            where=prepared.name,
            advice="give at least one batch; an iterator that was gone through before gives none",
        )
    prepared.stage = max(prepared.stage, Stage.CALIBRATED)
    coarse = tuple(coarse_groups(prepared))
    warned = (f"{COARSE}{row}" for row in coarse)
    prepared.log.append(LogEntry("calibrate", seconds, True, (batch_count(whole.batches), *notes, *warned)))
    plan = prepared.plan
    return CalibrationReport(
        prepared.name,
        whole.batches,
        plan.batches,
        whole.samples,
        seconds,
        rows_of(prepared),
        tuple(notes),
        coarse,
        dict(plan.statistics),
        partial(notes_for, prepared, plan.batches, whole.samples),
        dict(plan.collected),
    )


def _check_prepared(prepared: Program, every: int) -> None:
    if prepared.stage < Stage.SHARED or prepared.stage >= Stage.QUANTIZED:
        done = "has been converted already" if prepared.stage >= Stage.QUANTIZED else "was not prepared"
        raise CalibrationError(
            f"{prepared.name} {done}",
            where=f"its stage is {prepared.stage.label}",
            advice="calibrate what qc.prepare gave, before qc.convert",
        )
    check_has_plan(prepared, "calibrate")
    if prepared.is_live:
        raise CalibrationError(
            f"{prepared.name} was prepared to be trained, and finds its ranges while it does",
            where="qat=True",
            advice="train it: qc.qat.train, or any loop; to calibrate, prepare without qat=True",
        )
    if every < 1:
        raise CalibrationError(
            f"a checkpoint every {every} batches", where="every", advice="give a whole number of at least 1"
        )


def _check_team(prepared: Program, team: Team, collect: Collect | None) -> None:
    if team.is_single:
        return
    for group, observation in prepared.plan.statistics.items():
        _refuse_ordered(group, observation)
    for group, observation in Tally(prepared, {}).whole.totals.items():
        _refuse_ordered(group, observation)
    facts = {"program": program_digest(prepared), "plan": plan_digest(prepared), "threads": torch.get_num_threads()}
    wanted = None if collect is None else collect.model_dump_json()
    team.agree({**facts, "batches so far": prepared.plan.batches, "collect": wanted})


def _refuse_ordered(group: str, observation: Observation) -> None:
    if observation.order is Order.MATTERS:
        raise CalibrationError(
            f"{observation.statistics} cannot be collected by several processes: {Order.MATTERS.value}",
            where=group,
            advice="calibrate with shard='alone', or observe with minmax, percentile, mse or entropy",
        )


def _checkpoint(
    prepared: Program, team: Team, path: str | os.PathLike[str] | None, every: int, collect: Collect | None
) -> Checkpoint | None:
    """The checkpoint of this process: each has a file of its own."""
    if path is None:
        return None
    place = as_path(path, SaveError)
    if team.size > 1:
        place = place.with_name(f"{place.name}.{team.rank}-of-{team.size}")
    identity = {
        "program": program_digest(prepared),
        "plan": plan_digest(prepared),
        "batches before": prepared.plan.batches,
        "share": team.name,
        "collect": None if collect is None else collect.model_dump_json(),
    }
    check_writable(place)  # batches take their time
    return Checkpoint(place, every, identity)


def _length(batches: Iterable[Any], team: Team) -> int | None:
    """Number of batches that this process will see, if known."""
    try:
        count = len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
    return count if team.size == 1 or team.takes == "given" else len(range(team.rank, count, team.size))


def _tell_failure(team: Team, error: Exception) -> None:
    """Take part in the exchange the others wait for, so that they fail too and do not hang."""
    text = f"{type(error).__name__}: {error.what if isinstance(error, QuantcError) else error}"
    team.exchange(Statistics({}, {"batches": 0, "samples": None, "failed": text}).to_bytes())
