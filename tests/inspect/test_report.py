"""The report of a quantized model: its lines, its tables, its warnings, and how fast it is."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.inspect.held_out import Outside
from quantc.inspect.report import MAX_ROWS, Report, Speed, Step
from quantc.ir.program import Program
from tests.support.rows import batches, quantized
from tests.support.techniques import WIDTH, attending_program, stack


@pytest.fixture(scope="module", name="attending")
def _attending() -> Program:
    return attending_program()


def test_speed_is_told_against_both_baselines() -> None:
    found = Speed("onnx", 4.0, 1.0, "ONNX Runtime", 2.0)
    assert str(found) == (
        "1 ms on onnx: 4.00 times as fast as float in torch (4 ms), 2.00 times as fast as float in ONNX Runtime "
        "(2 ms) (one thread, the example inputs)"
    )
    assert not found.warnings


def test_speed_is_the_quotient_of_the_times_that_are_shown() -> None:
    found = Speed("x86", 0.129963, 0.0218649, "torch with norms folded", 0.1111119)
    told = str(found)
    shown = [float(text) for text in re.findall(r"([0-9.]+) ms", told)]
    ratios = re.findall(r"([0-9.]+) times as fast", told)
    assert ratios == [f"{shown[1] / shown[0]:.2f}", f"{shown[2] / shown[0]:.2f}"]
    data = found.to_data()
    assert data["times"] == data["before"] / data["after"]
    assert data["runtime_times"] == data["runtime_before"] / data["after"]
    assert [data["after"], data["before"], data["runtime_before"]] == shown


def test_a_slower_program_says_so() -> None:
    found = Speed("onnx", 4.0, 2.5, "ONNX Runtime", 2.0)
    assert "1.25 times slower than float in ONNX Runtime (2 ms)" in str(found)
    assert found.warnings == ("the quantized program on onnx is 1.25 times slower than float in ONNX Runtime",)
    report = replace(quantized(nn.Linear(8, 4), batches(3)).report, speed=found)
    assert str(report).startswith("warning: the quantized program on onnx is 1.25 times slower")
    assert report.to_data()["speed"]["runtime_times"] == 0.8


def test_a_runtime_that_does_not_take_the_float_program_is_told() -> None:
    told = str(Speed("onnx", 4.0, 1.0, why_not="float on the same runtime not measured: sdpa has no form"))
    assert told.endswith("float on the same runtime not measured: sdpa has no form")


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("dynamic", "calibrated with: no data: the scales of activations are found as the program runs"),
        ("weight-only", "calibrated with: no data: weights alone are quantized"),
    ],
)
@pytest.mark.parametrize("to", ["qdq", "integer"])
def test_the_report_says_what_it_was_measured_on(mode: Any, to: Any, says: str, attending: Program) -> None:
    report = qc.quantize(attending, None, mode=mode, to=to).report
    assert says in str(report)
    assert "dB over the example inputs" in str(report)
    assert report.to_data()["measured_on"] == "example inputs"
    assert "  technique  " in str(report)
    assert any(line.split()[:4] == ["linear", "linear", "linear", mode] for line in str(report).splitlines())
    given = qc.quantize(attending, None, [torch.randn(2, 8, 6)], mode=mode, to=to).report
    assert says in str(given)
    assert "dB over 1 batch\n" in str(given)
    assert given.to_data()["measured_on"] == "batches"


def test_the_report_tells_the_size_in_a_file_where_it_is_packed() -> None:
    program, _, _ = stack(["static"] * 3)
    result = qc.quantize(program, None, config=qc.QuantConfig().set_all(qc.INT4_GROUP))
    text = next(line for line in str(result.report).splitlines() if line.startswith("  size: "))
    assert "packed in a file" in text
    share = float(text.rpartition("(")[2].rstrip("%)")) / 100
    weights, biases = 3 * WIDTH * WIDTH, 3 * WIDTH * 4
    least = (weights / 2 + biases) / (weights * 4 + biases)
    assert least < share < least + 0.05


def test_the_report_of_static_quantization_reads_as_it_did(attending: Program) -> None:
    text = str(qc.quantize(attending, None, [torch.randn(2, 8, 6) for _ in range(3)]).report)
    assert "calibrated with: 3 batches" in text
    assert "dB over 2 batches" in text
    assert "  technique  " not in text


def test_a_speed_that_cannot_be_told_from_equal_is_no_warning() -> None:
    assert Speed("x86", 0.98, 1.0).warnings == ()
    assert Speed("x86", 0.96, 1.0).warnings
    assert Speed("x86", 1.0, 0.0).times == math.inf
    assert Speed("x86", 1.0, 2.0).runtime_times is None


@pytest.fixture(scope="module", name="report")
def _report() -> Report:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(8, 8), nn.LogSigmoid())]
    return quantized(nn.Sequential(*layers), batches(3)).report


def test_the_lines_at_the_top(report: Report) -> None:
    timed = replace(report, steps=(Step("capture", 1.25), Step("convert", 0.5)), speed=None)
    fields = timed.fields({"out": "model.qc"})
    assert list(fields) == ["out", "coverage", "calibrated with", "SQNR", "size", "time"]
    assert fields["calibrated with"] == "3 batches"
    assert fields["time"] == "capture 1.25 s, convert 0.50 s"
    assert timed.title == "Sequential, quantized for x86"
    assert replace(timed, form="integer").title.endswith(", in integer form")
    assert list(replace(timed, speed=Speed("x86", 2.0, 1.0)).fields())[-2] == "speed"


def test_without_a_comparison_nothing_is_claimed(report: Report) -> None:
    bare = replace(report, comparison=None)
    assert bare.fields()["SQNR"].startswith("not measured")
    data = bare.to_data()
    assert (data["comparison"], data["measured_on"], data["held_out"]) == (None, None, None)
    assert "what each quantized op costs, the worst first" not in [section.title for section in bare.sections()]


def test_tables_hold_all_rows_and_the_text_some(report: Report) -> None:
    costs, left, *_ = report.sections()
    assert len(costs.rows) == len(left.rows) == 12
    assert {row[1] for row in left.rows} == {"aten.log_sigmoid.default"}
    assert all("log_sigmoid" not in row[1] for row in costs.rows)
    assert report.comparison is not None
    doubled = replace(report.comparison, layers=report.comparison.layers * 2)
    text = str(replace(report, comparison=doubled))
    assert f"… and {24 - MAX_ROWS} more: result.report.comparison.costliest()" in text
    assert len([line for line in text.splitlines() if line.split()[1:3] == ["linear", "linear"]]) == MAX_ROWS


def test_what_it_was_measured_on_is_told_truly(report: Report) -> None:
    seen = replace(report, is_held_out=False)
    assert seen.fields()["SQNR"].endswith("batches that calibration saw")
    held = replace(report, is_held_out=True)
    assert held.fields()["SQNR"].endswith("held-out batches")
    assert replace(held, calibration=None).fields()["SQNR"].endswith("dB over 2 batches")
    assert replace(report, measured_on="example inputs").fields()["SQNR"].endswith("the example inputs")


def test_warnings_and_notes_come_first_and_last(report: Report) -> None:
    assert report.comparison is not None
    far = Outside("x", 0.5, (0.0, 1.0), (0.0, 255.0))
    told = replace(report, outside=(far,), comparison=replace(report.comparison, notes=("by the way",)))
    lines = str(told).splitlines()
    assert lines[0].startswith("warning: the data measured on is not like that calibrated with: 50% of input x")
    assert "note: by the way" in str(told).replace("\n", " ")
    assert json.loads(told.to_json())["outside"] == [
        {"name": "x", "share": 0.5, "calibrated": [0.0, 1.0], "measured": [0.0, 255.0]}
    ]
    page = told.to_html({"out": "model.qc"})
    assert page.index("50% of input x") < page.index("model.qc") < page.index("by the way")
