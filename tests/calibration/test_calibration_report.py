"""The report of a calibration, as text and as data."""

from __future__ import annotations

import json

import torch

import quantc as qc
from quantc.calibration.calibration_report import SHOWN, CalibrationReport, GroupRange, batch_count, rows_of
from quantc.calibration.underflow import Coarse
from quantc.observe import MinMax
from tests.support.calibration import data, eager_activations, prepared, small


@torch.no_grad()
def test_the_report_says_what_was_seen() -> None:
    program = prepared("minmax")
    report = qc.calibrate(program, data())
    activations = [eager_activations(small(), x)["add"] for x in data()]
    row = next(row for row in report.groups if row.where.startswith("add "))
    assert row.low == min(float(x.min()) for x in activations)
    assert row.high == max(float(x.max()) for x in activations)
    assert row.seen == sum(x.numel() for x in activations)
    assert (report.batches, report.total, report.samples) == (9, 9, 18)
    assert report.unseen == ()
    text = str(report)
    assert "9 batches, 18 samples" in text
    assert f"{row.high:.4g}" in text
    assert json.loads(json.dumps(report.to_json()))["groups"][0]["seen"] == report.groups[0].seen
    assert set(report.statistics.sites) == {row.group for row in report.groups}


def row(name: str, seen: int = 3) -> GroupRange:
    return GroupRange(name, f"{name} (fc : Linear)", "minmax", None if not seen else -0.123456, 2.0, seen)


def report(*rows: GroupRange, batches: int = 2, total: int = 2, samples: int | None = 8) -> CalibrationReport:
    coarse = (Coarse("a:in0", "relu", 0.0, 1e-6, 2**-12, 1, 256),)
    return CalibrationReport(
        "Net", batches, total, samples, 1.25, rows, ("1 batch from the checkpoint",), coarse, {}, lambda: {"batches": 2}
    )


def test_the_text_has_a_line_for_each_fact() -> None:
    lines = str(report(row("a:in0"), row("b:in0", 0))).splitlines()
    assert lines[0] == "calibrated Net: 2 batches, 8 samples, 1.2 s"
    assert lines[1].strip() == "1 batch from the checkpoint"
    assert lines[2].strip().startswith("warning: relu")
    assert "b:in0" in lines[3]
    assert "a:in0" not in lines[3]  # which was seen
    assert lines[4].split() == ["tensor", "observe", "low", "high", "seen"]
    assert lines[5].split()[-4:] == ["minmax", "-0.1235", "2", "3"]
    assert lines[6].split()[-3:] == ["-", "2", "0"]


def test_earlier_calls_are_told_and_unknown_samples_are_not() -> None:
    first = str(report(batches=1, total=5, samples=None)).splitlines()[0]
    assert first == "calibrated Net: 1 batch (5 in all), 1.2 s"
    assert [batch_count(number) for number in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]


def test_a_long_table_is_cut_and_says_so() -> None:
    text = str(report(*(row(f"n{index}:in0") for index in range(SHOWN + 3))))
    assert f"n{SHOWN - 1}:in0" in text
    assert f"n{SHOWN}:in0" not in text
    assert "3 more" in text.splitlines()[-1]
    assert "more" not in str(report(*(row(f"n{index}:in0") for index in range(SHOWN))))


def test_the_data_is_json_with_all_rows() -> None:
    found = json.loads(json.dumps(report(row("a:in0"), row("b:in0", 0)).to_json()))
    assert found["unseen"] == ["b:in0"]
    assert [group["low"] for group in found["groups"]] == [-0.123456, None]
    assert found["coarse"][0]["levels"] == 1
    assert found["warnings"][0].startswith("relu")


def test_what_statistics_are_of_is_asked_for_once_and_only_when_needed() -> None:
    asked: list[int] = []

    def describe() -> dict[str, int]:
        asked.append(1)
        return {"batches": 9}

    seen = {"a:in0": MinMax()}
    made = CalibrationReport("Net", 1, 1, 1, 0.0, (), (), (), seen, describe)
    assert asked == []
    assert made.statistics.notes == made.statistics.notes == {"batches": 9}
    assert asked == [1]
    assert dict(made.statistics.sites) == seen


def test_groups_that_were_not_calibrated_have_no_range() -> None:
    rows = rows_of(prepared("minmax"))
    assert [each.group for each in rows] == [
        "conv2d:in0", "conv2d_1:in0", "add:in0", "add:out0", "linear:in0", "linear:out0",
    ]  # fmt: skip
    assert {(each.low, each.high, each.seen) for each in rows} == {(None, None, 0)}
    assert rows[2].where.startswith("conv2d_1 ")  # the node that makes it, not the one that reads it
