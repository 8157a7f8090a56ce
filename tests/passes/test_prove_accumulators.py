"""The pass that proves accumulators: it changes nothing, and its notes name the worst."""

from __future__ import annotations

import pytest

import quantc as qc
from quantc.errors import PipelineError
from quantc.ir.program import Program
from quantc.passes.prove_accumulators import ProveAccumulators
from quantc.pipeline.pipeline import Pipeline
from tests.support.proven_models import prepared_products


@pytest.fixture(scope="module")
def prepared() -> Program:
    return prepared_products()


def test_the_log_names_the_worst(prepared: Program) -> None:
    program = qc.convert(prepared, reduce_range="no")
    entry = next(entry for entry in program.log if entry.name == "prove-accumulators")
    assert not entry.changed
    assert "can saturate on avx2, avx512" in entry.notes[0]
    assert "activations up to 128" in entry.notes[1]  # two activations, whose bounds are the widest
    assert entry.notes[-1] == "and 5 more"


def test_it_changes_nothing_and_says_the_same_again(prepared: Program) -> None:
    program = qc.convert(prepared, reduce_range="no")
    before = program.dump("text")
    first, second = ProveAccumulators().run(program), ProveAccumulators().run(program)
    assert first == second
    assert not first
    assert program.dump("text") == before


def test_of_safe_sums_there_is_one_note(prepared: Program) -> None:
    outcome = ProveAccumulators().run(qc.convert(prepared, reduce_range="activations"))
    (note,) = outcome.notes
    assert note.startswith("8 products of integers, accumulators of at most")
    assert note.endswith("8 safe")


def test_a_program_without_integers_is_refused_before_it_runs(prepared: Program) -> None:
    with pytest.raises(PipelineError, match="prove-accumulators needs a program that is folded"):
        Pipeline((ProveAccumulators(),)).run(prepared)
