"""What a calibration collects: its text, its cost, and what is refused."""

from __future__ import annotations

import pytest

import quantc as qc
from quantc.calibration.collect import Collect, collection_of, gigabytes, share_of
from quantc.errors import CalibrationError, QuantcError, SpecError
from tests.support.calibration import data, prepared


def test_the_forms_of_a_choice() -> None:
    assert Collect.of(None) is Collect.of("") is Collect.of([]) is None
    every = Collect.of("recover")
    assert every is not None
    assert (
        every.kinds()
        == Collect(statistics="gram,extremes,tokens").kinds()
        == {"gram": {}, "extremes": {}, "tokens": {}}
    )
    both = Collect.of(["gram", "reservoir{rows=64}"])
    assert both is not None
    assert both.kinds() == {"gram": {}, "reservoir": {"rows": 64}}
    assert Collect.of(both) is both


@pytest.mark.parametrize("text", ["grams", "cross-gram", "gram{rows=3}", "reservoir{rows=0}", "gram{"])
def test_unknown_statistics_and_options(text: str) -> None:
    with pytest.raises(QuantcError):
        Collect(statistics=text)


def test_memory_is_as_it_was_said() -> None:
    program = prepared()
    for name in ("moments", "gram", "reservoir{rows=7}"):
        said = collection_of(program, Collect(statistics=name)).bytes
        program.plan.collected = {}
        qc.calibrate(program, data(), collect=name)
        states = [halves.to_state() for halves in program.plan.collected.values()]
        assert sum(x.nbytes for state in states for x in state.tensors.values()) == said


def test_the_cost_is_said_and_refused_above_the_limit() -> None:
    program = prepared()
    report = qc.calibrate(program, data(2), collect="recover")
    (told,) = report.notes
    assert told.startswith("collected gram, extremes of 3 tensors: 196.7 kB")
    assert "x the multiply-adds of their layers" in told
    with pytest.raises(CalibrationError, match=r"more than the limit of 50\.0 kB") as found:
        qc.calibrate(program, data(2), collect=Collect(max_bytes=50_000))
    assert "without=('conv2d_1',)" in str(found.value.advice)
    qc.calibrate(program, data(2), collect=Collect(max_bytes=50_000, without=("conv2d_1",)))


def test_work_is_that_of_the_rows_that_are_taken() -> None:
    found = collection_of(prepared(), Collect(effort=0.25))
    convs = [tap.rows for tap in found.taps if tap.rows is not None and tap.rows.window is not None]
    rows = 2 * 8 * 8
    assert [each.kept(rows, share_of(each, 0.25)) for each in convs] == [27, 72]  # as many as there are channels
    assert [each.kept(100 * rows, share_of(each, 0.25)) for each in convs] == [
        949,
        356,
    ]  # 0.25 * 8 / 27 and / 72 of them
    more = collection_of(prepared(), Collect(effort=4.0)).work
    assert found.work is not None
    assert more is not None
    assert more >= found.work > 1


def test_layers_left_out_by_name_module_or_glob() -> None:
    program = prepared()
    for selector in ("conv2d_1", "conv2", "conv*1"):
        found = collection_of(program, Collect(without=(selector,)))
        assert len(found.taps) < 3
    with pytest.raises(SpecError, match="'conv9' names no layer"):
        collection_of(program, Collect(without=("conv9",)))
    with pytest.raises(CalibrationError, match="nothing to collect"):
        collection_of(program, Collect(without=("*",)))


def test_sizes_as_text() -> None:
    assert [gigabytes(count) for count in (10, 3200, 20_100_000, 1_400_000_000)] == [
        "0.0 kB",
        "3.2 kB",
        "20.1 MB",
        "1.4 GB",
    ]
