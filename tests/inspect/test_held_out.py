"""Batches that calibration does not see: parted from the others, checked, and held against what calibration saw."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import CalibrationError, DataError, InputError
from quantc.inspect.held_out import First, Last, Outside, outside, sound, split_held_out
from tests.support.rows import batches, quantized


def test_held_out_batches_are_not_calibrated_with() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    data = batches(6)
    data[-1] = data[-1] * 100  # of which calibration must see nothing
    found = quantized(model, data, held_out=1)
    alone = quantized(model, data[:-1])
    assert found.report.calibration is not None
    assert found.report.calibration.batches == 5
    assert torch.equal(found(data[0]), alone(data[0]))
    assert "over 1 held-out batch" in str(found.report)
    assert found.report.to_data()["held_out"] is True
    assert found.report.warnings
    assert all("over 1 held-out batch" in text for text in found.report.warnings)


def test_held_out_may_be_batches_of_their_own() -> None:
    model = nn.Linear(8, 4)
    data = batches(6)
    found = quantized(model, iter(data[:4]), held_out=data[4:])
    assert found.report.comparison is not None
    assert found.report.comparison.batches == 2
    assert "over 2 held-out batches" in str(found.report)


def test_without_them_nothing_changes() -> None:
    model = nn.Linear(8, 4)
    data = batches(6)
    found = quantized(model, data)
    prepared = qc.prepare(qc.capture(model, (data[0],)), "x86")
    qc.calibrate(prepared, data)
    assert torch.equal(found(data[0]), qc.convert(prepared)(data[0]))
    assert "over 2 batches that calibration saw" in str(found.report)


@pytest.mark.parametrize("mode", ["dynamic", "weight-only"])
def test_modes_without_calibration_are_measured_on_the_last(mode: Any) -> None:
    found = quantized(nn.Linear(8, 4), iter(batches(5)), mode=mode, held_out=3)
    assert found.report.comparison is not None
    assert found.report.comparison.batches == 3


def test_holding_out_all_is_refused() -> None:
    with pytest.raises(qc.QuantcError, match="none is left to calibrate with"):
        quantized(nn.Linear(8, 4), batches(2), held_out=2)
    with pytest.raises(qc.QuantcError, match="held_out is 0"):
        quantized(nn.Linear(8, 4), batches(2), held_out=0)


@pytest.mark.parametrize("none", [[], (), iter(())], ids=["list", "tuple", "generator"])
def test_holding_out_nothing_is_refused(none: Any) -> None:
    with pytest.raises(qc.QuantcError, match="held_out holds no batch"):
        quantized(nn.Linear(8, 4), batches(2), held_out=none)


def test_what_the_model_takes_is_taken_of_held_out_batches_too() -> None:
    labelled = [(batch.double(), torch.zeros(len(batch))) for batch in batches(4)]
    model = nn.Linear(8, 4).eval()
    found = qc.quantize(model, (batches(1)[0],), labelled, inputs=0, dtype="float32", held_out=labelled[:1])
    assert found.report.comparison is not None
    assert found.report.comparison.sqnr > 20
    with pytest.raises(qc.QuantcError, match="batch 0 does not fit"):
        qc.quantize(model, (batches(1)[0],), batches(2), held_out=labelled[:1])


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight-only"])
@pytest.mark.parametrize(("bad", "told"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_held_out_batches_that_are_not_finite_are_refused_by_name(mode: Any, bad: float, told: str) -> None:
    data = batches(4)
    data[3][1, 2] = bad
    with pytest.raises(qc.QuantcError, match=rf"held-out batch 1: input '\w+' holds {told}"):
        quantized(nn.Linear(8, 4), data, mode=mode, held_out=2)


def numbers(count: int) -> Any:
    return iter(range(count))


@pytest.mark.parametrize("count", [1, 3])
def test_the_last_batches_are_parted_from_the_others_of_whatever_length(count: int) -> None:
    first, last = split_held_out(numbers(5), count)
    assert first is not None
    assert last is not None
    assert list(first) == list(range(5 - count))
    assert list(last) == list(range(5 - count, 5))


def test_without_calibration_the_last_are_found_all_the_same() -> None:
    _, last = split_held_out(numbers(5), 2)
    assert last is not None
    assert list(last) == [3, 4]
    assert list(last) == [3, 4], "as often as one asks"


def test_a_length_is_told_where_there_is_one() -> None:
    assert len(First(Last([1, 2, 3], 1))) == 2
    assert len(First(Last([1, 2, 3], 9))) == 0
    with pytest.raises(TypeError):
        len(First(Last(numbers(3), 1)))


def test_batches_of_their_own_are_left_as_they_are() -> None:
    given, own = [1, 2], [3]
    assert split_held_out(given, None) == (given, None)
    first, last = split_held_out(given, own)
    assert first is given
    assert last is own


@pytest.mark.parametrize("held_out", [0, -1, True, [], torch.ones(2), {"x": 1}])
def test_what_is_no_number_of_batches_and_no_batches_is_refused(held_out: Any) -> None:
    with pytest.raises((InputError, CalibrationError)):
        split_held_out([1, 2, 3], held_out)


def test_a_number_needs_batches() -> None:
    with pytest.raises(InputError, match="no batches"):
        split_held_out(None, 2)
    first, _ = split_held_out(numbers(2), 2)
    assert first is not None
    with pytest.raises(CalibrationError, match="2 batches, and 2 are held out"):
        next(iter(first))


def calibrated(*data: Tensor) -> qc.Program:
    torch.manual_seed(0)
    prepared = qc.prepare(qc.capture(nn.Linear(8, 4).eval(), (data[0],)), "x86")
    qc.calibrate(prepared, data, progress="silent")
    return prepared


def test_inputs_far_outside_of_what_was_seen_are_told_with_their_share() -> None:
    seen = torch.linspace(0, 1, 16).reshape(2, 8)
    prepared = calibrated(seen)
    assert outside(prepared, [seen, seen * 1.2 - 0.1]) == (), "a quarter of the width is allowed on either side"
    half = seen.clone()
    half[1] = 100.0
    (found,) = outside(prepared, [half])
    assert found.share == 0.5
    assert found.calibrated == (0.0, 1.0)
    assert found.measured == (0.0, 100.0)
    (both,) = outside(prepared, [half, seen])
    assert both.share == 0.25
    (below,) = outside(prepared, [-half])
    assert below.share > 0.5
    assert below.measured[0] == -100.0


def test_few_values_outside_are_not_told() -> None:
    seen = torch.linspace(0, 1, 800).reshape(100, 8)
    prepared = calibrated(seen)
    few = seen.clone()
    few[0] = 50.0  # one in a hundred
    assert outside(prepared, [few]) == ()
    few[1, 0] = 50.0
    assert len(outside(prepared, [few])) == 1


def test_what_is_told_names_both_ranges() -> None:
    told = Outside("x", 0.255, (0.0, 1.0), (-3.0, 255.0)).told("2 held-out batches")
    assert "26% of input x over 2 held-out batches" in told
    assert "-3..255 against 0..1" in told


def test_batches_to_measure_on_are_finite_and_at_least_one() -> None:
    captured = calibrated(batches(1)[0])
    good, bad = batches(2)
    assert sound(iter([good]), captured) == [good]
    with pytest.raises(InputError, match="holds no batch"):
        sound([], captured)
    bad[0, 0] = math.inf
    with pytest.raises(DataError, match="held-out batch 1") as caught:
        sound([good, bad], captured)
    assert "batch 1" in str(caught.value.where)
