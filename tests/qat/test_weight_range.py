"""Weight ranges in which no sum of two products overflows 16 bits, chosen before training."""

from __future__ import annotations

from dataclasses import replace

import pytest

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.x86 import X86
from quantc.ir.decisions import Quantize
from quantc.ir.program import Program
from quantc.qat.weight_range import narrow_weights
from quantc.spec.spec import QuantSpec
from tests.support.training import prepared, small_program, trained


def test_weights_train_in_a_range_whose_sums_cannot_overflow() -> None:
    program = trained(prepared())
    entries = [note for entry in program.log for note in entry.notes if "-64..64" in note]
    assert entries
    converted = qc.convert(program)
    assert not any("raised" in note for entry in converted.log for note in entry.notes)
    proof = next(entry for entry in converted.log if entry.name == "prove-accumulators")
    assert any("safe" in note for note in proof.notes)


def planned(act: QuantSpec, instruction_set: str = "avx2", weight: QuantSpec = qc.INT8_NARROW_WEIGHT) -> Program:
    backend: Backend = replace(
        X86, roles={**X86.roles, "act": act, "weight": weight}, instruction_set=instruction_set, takes=()
    )
    return qc.prepare(small_program(), backend)


def weight_ranges(program: Program) -> set[tuple[int, int]]:
    outcomes = [group.outcome for group in program.plan.groups if group.name.endswith("in1")]
    return {(outcome.spec.qmin, outcome.spec.qmax) for outcome in outcomes if isinstance(outcome, Quantize)}


@pytest.mark.parametrize("act", [qc.UINT8, qc.UINT8.but(qmax=127), qc.INT8, qc.UINT8.but(qmax=63)], ids=str)
def test_two_of_the_largest_products_fit_and_one_more_level_would_not(act: QuantSpec) -> None:
    program = planned(act)
    notes = narrow_weights(program)
    ((low, high),) = weight_ranges(program)
    assert low == -high
    largest = act.qmax + (128 if act.dtype.is_signed else 0)  # the kernels shift signed bytes
    assert 2 * largest * high <= 32767
    if high < 127:
        assert 2 * largest * (high + 1) > 32767
        assert f"2 weights train in {low}..{high}" in notes[0]
    else:
        assert notes == []


def test_instruction_sets_that_add_in_32_bits_leave_the_plan_alone() -> None:
    program = planned(qc.UINT8, "avx-vnni")
    before = program.plan.groups
    assert narrow_weights(program) == []
    assert program.plan.groups == before


def test_ranges_that_are_narrow_already_stay() -> None:
    program = planned(qc.UINT8, weight=qc.INT8_NARROW_WEIGHT.but(qmin=-7, qmax=7))
    assert narrow_weights(program) == []
    assert weight_ranges(program) == {(-7, 7)}


def test_narrowing_twice_changes_nothing_more() -> None:
    program = planned(qc.UINT8)
    narrow_weights(program)
    before = program.plan.groups
    assert narrow_weights(program) == []
    assert program.plan.groups == before
