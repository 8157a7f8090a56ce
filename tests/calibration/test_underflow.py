"""Tensors too small for the smallest scale: told by name by calibration, conversion, coverage, report and command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import quantc as qc
from quantc.calibration.underflow import coarse_channels, coarse_groups, coarse_reach
from quantc.cli.app import app
from quantc.errors import QuantcError

EPS = 2.0**-12
SEEDED = torch.Generator().manual_seed(0)
X = torch.randn(4, 8, generator=SEEDED)


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False)).eval()


def prepared(x: torch.Tensor, config: qc.QuantConfig | None = None) -> qc.Program:
    return qc.prepare(qc.capture(layer(), (x,)), "x86", config=config)


# -- what is coarse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["affine", "symmetric"])
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 3e-3, 1e-2, 2e-2, 5e-2, 1.0])
def test_levels_are_those_that_torch_quantizes_to(scheme: str, magnitude: float) -> None:
    """Against torch: its observer's scale with the same eps, and the integers its op gives."""
    spec = qc.QuantSpec.parse(f"int8{{scheme={scheme}}}")
    x = torch.linspace(-1, 1, 4001) * magnitude
    observer = torch.ao.quantization.MinMaxObserver(
        dtype=torch.qint8,
        qscheme=torch.per_tensor_affine if scheme == "affine" else torch.per_tensor_symmetric,
        quant_min=-128,
        quant_max=127,
        eps=EPS,
    )
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    quantized = torch.quantize_per_tensor(x, float(scale), int(zero_point), torch.qint8)
    count = len(set(quantized.int_repr().tolist()))
    found = coarse_reach(spec, float(x.min()), float(x.max()))
    if count >= 128:
        assert found is None
    else:
        assert found is not None
        assert found[0] == count
        assert found[1] == pytest.approx(256, abs=1)


def test_half_of_a_symmetric_range_is_no_loss_by_itself() -> None:
    spec = qc.QuantSpec.parse("int8{scheme=symmetric}")
    assert coarse_reach(spec, 0.0, 127 * EPS * 0.6) is None
    found = coarse_reach(spec, 0.0, 127 * EPS * 0.25)
    assert found is not None
    assert found == (33, 129)


def test_formats_that_have_no_smallest_scale_in_the_way_are_left_alone() -> None:
    assert coarse_reach(qc.FP16_WEIGHT, -1e-6, 1e-6) is None
    assert coarse_reach(qc.INT8.but(eps=1e-12), -1e-6, 1e-6) is None


# -- who says so ------------------------------------------------------------------------------------------------------


def test_all_of_it_becomes_zero_and_everybody_says_so() -> None:
    tiny = X * 1e-6
    program = prepared(tiny)
    report = qc.calibrate(program, [tiny])
    (row,) = [row for row in report.coarse if row.levels == 1]
    assert row.low == pytest.approx(float(tiny.min()))
    assert row.high == pytest.approx(float(tiny.max()))
    assert row.scale == EPS
    said = str(row)
    assert "every number becomes zero" in said
    assert "input" in row.where
    assert f"warning: {said}" in str(report)
    assert said in report.to_json()["warnings"]
    assert f"warning: {said}" in program.log[-1].notes
    assert f"warning: {said}" in str(program.coverage())
    converted = qc.convert(program)
    assert any(f"warning: {said}" in entry.notes for entry in converted.log if entry.name == "quantize")
    assert said in converted.coverage().warnings
    assert torch.equal(converted(tiny), torch.zeros(4, 8))  # it is as bad as that


def test_the_report_has_it_at_the_top_in_text_json_and_html() -> None:
    tiny = X * 1e-6
    report = qc.quantize(layer(), (tiny,), [tiny]).report
    (said,) = [text for text in report.warnings if "every number becomes zero" in text]
    assert f"warning: {said}" in str(report).splitlines()
    assert said in report.to_data()["warnings"]
    assert f'<p class="warning">{said}</p>' in report.to_html()


def test_few_levels_are_counted() -> None:
    small = X * 1e-3
    report = qc.calibrate(prepared(small), [small])
    (row,) = [row for row in report.coarse if "input" in row.where]
    quantized = torch.round(small / EPS)
    assert row.levels == int(quantized.max() - quantized.min()) + 1
    assert f"come to {row.levels} of {row.of} levels" in str(row)


def test_ranges_of_ordinary_size_say_nothing() -> None:
    program = prepared(X)
    assert qc.calibrate(program, [X]).coarse == ()
    converted = qc.convert(program)
    assert converted.coverage().warnings == ()
    assert not any("warning: " in note for entry in converted.log for note in entry.notes)


def test_a_finer_smallest_scale_is_the_way_out() -> None:
    tiny = X * 1e-6
    fine = qc.QuantConfig().set_all(qc.UINT8.but(eps=1e-12))
    program = prepared(tiny, fine)
    assert qc.calibrate(program, [tiny]).coarse == ()
    assert qc.compare(program, qc.convert(program), [tiny]).sqnr > 30


def test_only_zeros_are_told_as_such() -> None:
    program = prepared(X)
    report = qc.calibrate(program, [torch.zeros(4, 8)])
    assert any("calibration saw only zeros" in str(row) for row in report.coarse)


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
def test_an_op_that_became_part_of_another_is_told_in_integer_form_too(backend: str) -> None:
    torch.manual_seed(0)
    convs = nn.Conv2d(8, 16, 3, bias=False), nn.Conv2d(16, 8, 3, bias=False)
    model = nn.Sequential(convs[0], nn.ReLU(), convs[1]).eval()
    x = torch.randn(2, 8, 12, 12) * 1e-2
    with pytest.warns(UserWarning, match="the smallest scale allowed"):
        result = qc.quantize(model, (x,), [(x,)], backend=backend, to="integer")
    assert any(row.where.startswith("conv2d") for row in coarse_groups(result.program))


def test_it_is_known_after_loading(tmp_path: Path) -> None:
    tiny = X * 1e-6
    qc.quantize(layer(), (tiny,), [tiny]).save(tmp_path / "model.qc")
    assert any("every number becomes zero" in text for text in qc.load(tmp_path / "model.qc").coverage().warnings)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_below_the_smallest_scale_of_a_backend_are_told() -> None:
    """XNNPACK takes no scale below 2^-12."""
    model = layer()
    with torch.no_grad():
        for weight in model.parameters():
            weight[2:5] *= 1e-3
            weight[7] = 0  # a channel that was pruned is as it should be
    converted = qc.quantize(model, (X,), [X], backend="executorch").program
    (said,) = [note for entry in converted.log for note in entry.notes if "scales are the smallest allowed" in note]
    assert "3 of 8 scales" in said
    assert "weight" in said
    exact = qc.quantize(model, (X,), [X], backend="x86").program
    assert not any("scales are the smallest" in note for entry in exact.log for note in entry.notes)


def test_channels_are_counted_one_by_one() -> None:
    spec = qc.INT8_WEIGHT.but(eps=EPS)
    weight = torch.ones(3, 4) * torch.tensor([[1.0], [EPS], [0.0]])
    assert coarse_channels(spec, weight) == (
        "1 of 3 scales are the smallest allowed, 0.000244, and should be finer: their numbers come to 2 of 256 levels"
    )
    assert coarse_channels(spec, torch.ones(3, 4)) is None


# -- command line -----------------------------------------------------------------------------------------------------


def test_the_command_line_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    x = torch.randn(4, 8) * 1e-6\n    return nn.Linear(8, 8).eval(), (x,), [x]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, ["quantize", "tiny_models:model", "--out", "model.qc"])
    sys.modules.pop("tiny_models", None)
    assert done.exit_code == 0, done.output
    assert any(line.startswith("warning: ") and "becomes zero" in line for line in done.stdout.splitlines())
    shown = CliRunner().invoke(app, ["inspect", "model.qc", "--json"])
    assert any("becomes zero" in text for text in json.loads(shown.stdout)["warnings"])
    assert "becomes zero" in CliRunner().invoke(app, ["inspect", "model.qc"]).stdout


def test_nothing_is_said_before_there_are_statistics() -> None:
    program = prepared(X)
    assert list(coarse_groups(program)) == []
    with pytest.raises(QuantcError):
        qc.convert(program)
