"""Implementation of `quantc compare`: finds two models and batches for both, runs them, and reports differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from quantc.calibration.calibration_report import batch_count
from quantc.calibration.state_isolation import Isolation
from quantc.cli.compare_inputs import Side, read_side
from quantc.cli.data_source import Data, batches_of
from quantc.cli.noise_inputs import example_leaves, noise_like
from quantc.errors import DataError, LoadError
from quantc.inspect.comparison import Comparison
from quantc.inspect.coverage import Row, Verdict
from quantc.ir.batch_inputs import batch_of, leaves_of
from quantc.ir.dialect import op_name
from quantc.ir.program import Program, Stage
from quantc.support.sqnr import Noise, add_outputs, as_data, check_alike, together
from quantc.text.diff import Diff, diff
from quantc.verbs.capture import Method
from quantc.verbs.compare import compare, in_form_of

SEED = 1
EXAMPLES = "the example inputs"


@dataclass(frozen=True)
class ComparedModel:
    """Batches, their origin, and notes on them."""

    batches: list[Any]
    told: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ComparedOps:
    """Number of occurrences of an op in each of two programs."""

    op: str
    a: int
    b: int


@dataclass(frozen=True)
class Decision:
    """An op on which two quantized programs decided differently."""

    node: str
    a: str
    b: str


@dataclass(frozen=True)
class Structure:
    """Static differences of two programs."""

    ops: tuple[ComparedOps, ...]
    """The ops that they do not have equally often."""
    decisions: tuple[Decision, ...]
    """Differing decisions on ops, if both programs are annotated or later."""
    is_quantizing: bool
    """True if one of them is quantized and the other is not, which explains most differences."""
    diff: Diff

    def to_data(self) -> dict[str, Any]:
        return {
            "same": not self.diff,
            "ops": [asdict(row) for row in self.ops],
            "decisions": [asdict(row) for row in self.decisions],
            "diff": asdict(self.diff),
        }


@dataclass(frozen=True)
class Compared:
    """Result of a comparison."""

    a: Side
    b: Side
    given: ComparedModel
    sqnr: float
    """Of all outputs of B together, with those of A for the signal."""
    outputs: tuple[float, ...]
    """Of each output; NaN for one without floats."""
    largest: tuple[float, ...]
    """The largest difference of a number, output by output."""
    comparison: Comparison | None = None
    """Op by op. Like `structure`, None where one of the two is no program."""
    structure: Structure | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        if self.comparison is not None:
            return (*self.given.notes, *self.comparison.notes)
        return (*self.given.notes, "ops are not compared one by one: kernels and other runtimes have others inside")

    def to_data(self) -> dict[str, Any]:
        found, structure = self.comparison, self.structure
        return {
            "a": self.a.to_data(),
            "b": self.b.to_data(),
            "measured_on": self.given.told,
            "batches": len(self.given.batches),
            "sqnr": as_data(self.sqnr),
            "outputs": [
                {"sqnr": as_data(sqnr), "largest": as_data(largest)}
                for sqnr, largest in zip(self.outputs, self.largest, strict=True)
            ],
            "layers": None if found is None else [layer.to_data() for layer in found.layers],
            "size": None if found is None else {"a": found.size.before, "b": found.size.after},
            "structure": None if structure is None else structure.to_data(),
            "notes": list(self.notes),
        }


def carry_out(a: str, b: str, data: str | None, noise: int | None, most: int | None, method: Method) -> Compared:
    """Read both, run both on the same batches, at most `most` of them, and compare."""
    read = None if data is None else Data.read(data)
    left, right = (read_side(source, method, None if read is None else read.examples) for source in (a, b))
    known = _known_program(left, right)
    given = _collect_batches(known, (left, right), read, noise, most)
    if left.is_open and right.is_open and left.program is not None and right.program is not None:
        return _op_by_op(left, left.program, right, right.program, given)
    return _outputs_only(left, right, known, given)


def _known_program(left: Side, right: Side) -> Program:
    """The program that says how inputs are arranged."""
    program = left.program if left.program is not None else right.program
    if program is None:
        raise LoadError(
            "neither A nor B says how its inputs are arranged: files of runtimes do not",
            where=f"{left.source} and {right.source}",
            advice="compare each of them with the program it was written from: the .qc file, or the model",
        )
    return program


def _collect_batches(
    program: Program, sides: tuple[Side, Side], data: Data | None, noise: int | None, most: int | None
) -> ComparedModel:
    if data is not None:
        read = data.batches(program)
        return _take_batches(read.values, f"--data {data.place}", most, read.notes)
    source = sides[0].source
    if noise is not None:
        note = f"noise like {EXAMPLES} (seed {SEED}): this says little about real inputs"
        made = noise_like(program, source, SEED, noise)
        batches = [batch_of(program, leaves) for leaves in made]
        return ComparedModel(batches, f"{batch_count(noise)} of noise like {EXAMPLES}", (f"the inputs are {note}",))
    for side in sides:
        if side.batches is not None:
            return _take_batches(batches_of(side.source, side.batches), f"those of {side.source}", most)
    leaves = example_leaves(program, source)
    note = f"the inputs are {EXAMPLES} alone: give --data for more"
    return ComparedModel([batch_of(program, leaves)], EXAMPLES, (note,))


def _take_batches(batches: Iterable[Any], where: str, most: int | None, notes: tuple[str, ...] = ()) -> ComparedModel:
    taken = list(islice(batches, most))
    if not taken:
        raise DataError("compared on zero batches", where=where, advice="give at least one batch")
    return ComparedModel(taken, f"{batch_count(len(taken))}, {where}", notes)


# -- programs ----------------------------------------------------------------------------------------------------------


def _op_by_op(a: Side, left: Program, b: Side, right: Program, given: ComparedModel) -> Compared:
    """The float one is brought into the form of the quantized one, so that their ops are the same ones."""
    first = given.batches[0]
    if left.stage < right.stage:
        left = in_form_of(right, left if a.model is None else a.model, first)
    elif right.stage < left.stage:
        right = in_form_of(left, right if b.model is None else b.model, first)
    found = compare(left, right, given.batches)
    return Compared(a, b, given, found.sqnr, found.outputs, found.largest, found, structure_of(left, right))


def structure_of(left: Program, right: Program) -> Structure:
    """Static differences of two programs."""
    counts = [Counter(op_name(node) for node in each.nodes() if node.op.startswith("call_")) for each in (left, right)]
    ops = sorted({*counts[0], *counts[1]})
    rows = [ComparedOps(op, counts[0][op], counts[1][op]) for op in ops if counts[0][op] != counts[1][op]]
    is_decided = min(left.stage, right.stage) >= Stage.ANNOTATED
    is_quantizing = (left.stage >= Stage.QUANTIZED) != (right.stage >= Stage.QUANTIZED)
    decisions = _decisions(left, right) if is_decided else ()
    return Structure(tuple(rows), decisions, is_quantizing, diff(left, right))


def _decisions(left: Program, right: Program) -> tuple[Decision, ...]:
    told = [{row.node: _decision_text(row) for row in each.coverage().rows} for each in (left, right)]
    both = [node for node in told[0] if node in told[1]]
    return tuple(Decision(node, told[0][node], told[1][node]) for node in both if told[0][node] != told[1][node])


def _decision_text(row: Row) -> str:
    if row.verdict is Verdict.FLOAT:
        return "float"
    return " ".join(part for part in (row.technique, row.verdict.value, f"by {row.rule}") if part)


# -- what only yields --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _outputs_only(a: Side, b: Side, known: Program, given: ComparedModel) -> Compared:
    noises: list[Noise] = []
    largest: list[float] = []
    runs = [(side.run, Isolation(side.program if side.program is not None else known)) for side in (a, b)]
    for index, batch in enumerate(given.batches):
        leaves = leaves_of(known, batch, index)
        made: list[list[Any]] = []
        for run, isolation in runs:
            with isolation.batch(index, leaves) as inputs:
                made.append([value for value in run(inputs) if isinstance(value, torch.Tensor)])
        check_alike(made[0], made[1], (a.name, b.name))
        add_outputs(made[0], made[1], noises, largest)
    outputs = tuple(noise.sqnr for noise in noises)
    return Compared(a, b, given, together(noises).sqnr, outputs, tuple(largest))
