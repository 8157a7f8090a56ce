"""A bad outcome is said on top: by how much, of what, and which line of a config leaves it float."""

from __future__ import annotations

import json
import math
import re
import tomllib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc import FLOAT, QuantConfig
from quantc.bench.float_runtime import in_float
from quantc.inspect.findings import MODEL_DB, OP_DB
from quantc.inspect.report import Speed


class Spiky(nn.Module):
    """A layer whose results are 1,000 times smaller than one number among them: 8 bits make zeros of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.spike, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        with torch.no_grad():
            self.spike.weight[0] *= 5000
            self.head.weight[:, 0] = 0
            self.head.weight.mul_(3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.spike(x))


def batches(count: int, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


def quantized(model: nn.Module, data: Any, **settings: Any) -> qc.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return qc.quantize(model.eval(), (batches(1)[0],), data, **settings)


@pytest.fixture(name="spiky")
def _spiky() -> Spiky:
    torch.manual_seed(0)
    return Spiky()


def test_a_bad_model_is_said_on_top(spiky: Spiky) -> None:
    report = quantized(spiky, batches(4)).report
    assert report.comparison is not None
    assert report.comparison.sqnr < MODEL_DB
    first, *others = report.warnings
    assert "below 20 dB" in first
    assert "2 batches that calibration saw" in first
    assert str(report).startswith(f"warning: {first[:20]}")
    assert any("below 10 dB alone" in text and 'QuantConfig().set("head", FLOAT)' in text for text in others)
    assert any("below half a step" in text and 'set_edge("linear", "linear_1", FLOAT)' in text for text in others)


def test_the_line_that_is_named_mends_it(spiky: Spiky) -> None:
    text = " ".join(quantized(spiky, batches(4)).report.warnings)
    line = text.partition("in TOML ")[2].partition("; ")[0].partition("]")[0] + "]"
    rules = tomllib.loads(line)
    config = QuantConfig.model_validate(rules)
    assert config == QuantConfig().set("head", FLOAT)
    mended = quantized(spiky, batches(4), config=config).report
    assert not mended.warnings


class Faint(nn.Module):
    """One large number beside many small ones, in the middle or in the input."""

    def __init__(self, in_input: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        faint = torch.tensor([1.0, *[1.0 if in_input else 1e-3] * 7])
        self.register_buffer("scale", faint)
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x) * self.scale)
        result: Tensor = self.b(y)
        return result


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("in_input", [False, True])
def test_the_line_that_is_named_for_a_tensor_mends_it(in_input: bool, mode: Any) -> None:
    torch.manual_seed(0)
    data = batches(4) if not in_input else [torch.cat([x[:, :1], x[:, 1:] * 1e-3], 1) for x in batches(4)]
    model = Faint(in_input).eval()
    report = quantized(model, data, mode=mode).report
    (text,) = (text for text in report.warnings if "below half a step" in text)
    assert "set_edge(" in text
    line = text.partition("in TOML ")[2].partition("]")[0] + "]"
    config = QuantConfig.model_validate(tomllib.loads(line))
    mended = quantized(model, data, config=config, mode=mode).report
    assert not any("below half a step" in text for text in mended.warnings)


def test_a_good_model_has_no_warnings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for settings in ({"mode": "static"}, {"mode": "dynamic"}, {"mode": "weight-only"}):
        assert not quantized(model, batches(4), **settings).report.warnings


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_calls_of_quantize_warn(mode: Any, spiky: Spiky) -> None:
    with pytest.warns(UserWarning, match="below 20 dB"):
        qc.quantize(spiky.eval(), (batches(1)[0],), batches(3), mode=mode)


def test_an_lstm_that_is_lost_is_told() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.lstm(x)[0])

    torch.manual_seed(0)
    data = [torch.randn(2, 5, 8) for _ in range(3)]
    data[0][0, 0, 0] = 1e5  # a number that no other batch comes near
    with pytest.warns(UserWarning, match="below"):
        result = qc.quantize(Tagger().eval(), (data[1],), data, backend="qnnpack", held_out=1)
    assert any('QuantConfig().set("lstm", FLOAT)' in text for text in result.report.warnings)


def test_json_and_page_say_it_too(spiky: Spiky) -> None:
    report = quantized(spiky, batches(4)).report
    found = json.loads(report.to_json())
    assert found["warnings"] == list(report.warnings)
    assert found["thresholds"] == {"model_dB": MODEL_DB, "op_dB": OP_DB, "vanished": 0.5}
    assert found["held_out"] is False
    assert found["comparison"]["vanished"]
    page = report.to_html()
    assert page.index('class="warning"') < page.index("<dl>")


def test_three_are_named_and_the_others_counted() -> None:
    torch.manual_seed(0)

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Spiky() for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([layer(x) for layer in self.layers], 1)

    text = next(each for each in quantized(Many(), batches(3)).report.warnings if "alone" in each)
    assert text.count("FLOAT)") == 3
    assert "and 2 more" in text


# -- what it is measured on ----------------------------------------------------------------------------------------


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


# -- how fast it is ------------------------------------------------------------------------------------------------


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
    ("target", "runtime"),
    [
        ("x86", "torch with norms folded"),
        ("onnx", "ONNX Runtime"),
        pytest.param("executorch", "ExecuTorch", marks=pytest.mark.slow),
    ],
)
def test_the_float_program_runs_on_the_same_runtime(target: str, runtime: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    found = in_float(target, qc.capture(model, (x,)))
    assert found.runtime == runtime
    torch.testing.assert_close(found.model(x), model(x), rtol=1e-4, atol=1e-5)
