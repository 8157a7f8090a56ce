"""A bad outcome is said on top: by how much, of what, and which line of a config leaves it float."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc import FLOAT, QuantConfig
from quantc.bench.float_runtime import in_float
from quantc.inspect.findings import MODEL_DB, OP_DB
from tests.support.rows import batches, quantized


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
