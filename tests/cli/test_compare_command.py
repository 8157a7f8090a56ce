"""`quantc compare`: what can be compared with what, on which inputs, what is printed, and the exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import quantc as qc
from quantc.cli.app import app
from quantc.cli.noise_inputs import noise_like

MODELS = """
import torch
from torch import nn

class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x)

class Absolute(nn.Module):
    def forward(self, x):
        return torch.sqrt(x.abs())

def plain(seed=0, width=8, outputs=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, outputs)).eval()
    return model, (torch.randn(2, 4, generator=torch.Generator().manual_seed(5)),)

def same():
    return plain()

def turned():
    model, inputs = plain()
    with torch.no_grad():
        model[2].bias[1] += 0.5
    return model, inputs

def wider():
    return plain(1, 16)

def longer():
    return plain(1, 8, 4)

def two_inputs():
    return nn.Bilinear(4, 3, 2).eval(), (torch.ones(2, 4), torch.ones(2, 3))

def root():
    return Root().eval(), (torch.ones(2, 4),)

def absolute():
    return Absolute().eval(), (torch.ones(2, 4),)

def with_batches():
    return (*plain(), batches())

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(3)]

def none():
    return []

def below_zero():
    return [-torch.ones(2, 4)]
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model, quantized in two ways."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "pair_models.py").write_text(MODELS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 4, generator=generator) for _ in range(3)]
    captured = qc.capture(model, (torch.randn(2, 4, generator=torch.Generator().manual_seed(5)),))
    captured.save(folder / "float.qc")
    first = qc.quantize(captured, None, batches)
    first.save(folder / "int8.qc")
    qc.quantize(captured, None, batches, config=qc.QuantConfig().set("2", qc.FLOAT)).save(folder / "mixed.qc")
    qc.lower(first.program, "x86").save(folder / "lowered.qc")
    return folder


@pytest.fixture(autouse=True)
def folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(saved)
    monkeypatch.syspath_prepend(str(saved))
    sys.modules.pop("pair_models", None)
    yield saved
    sys.modules.pop("pair_models", None)


def compare(*args: str) -> Result:
    return CliRunner().invoke(app, ["compare", *args])


def document(*args: str, code: int = 0) -> dict[str, Any]:
    result = compare(*args, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refuse(*args: str) -> str:
    result = compare(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "what to do: " in result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(3)]


# -- programs ---------------------------------------------------------------------------------------------------------


def test_a_float_model_and_its_quantized_program(saved: Path) -> None:
    found = document("pair_models:plain", "int8.qc", "--data", "pair_models:batches")
    expected = qc.compare(qc.load(saved / "float.qc"), qc.load(saved / "int8.qc"), batches())
    assert found["sqnr"] == pytest.approx(expected.sqnr, abs=1e-6)
    assert found["batches"] == 3
    assert found["measured_on"] == "3 batches, --data pair_models:batches"
    assert [row["node"] for row in found["layers"]] == ["linear", "relu", "linear_1"]
    assert [row["local"] for row in found["layers"] if row["op"] == "linear"] == [
        pytest.approx(expected.layer(node).local, abs=1e-6)  # type: ignore[union-attr]
        for node in ("linear", "linear_1")
    ]
    counts = {row["op"].split(".")[1]: (row["a"], row["b"]) for row in found["structure"]["ops"]}
    assert counts["quantize_per_tensor"] == (0, 2)
    assert found["a"]["stage"] == "canonical"
    assert found["b"]["stage"] == "folded"
    # what the outputs are off by, by the model itself
    model = qc.load(saved / "float.qc")
    quantized = qc.load(saved / "int8.qc")
    largest = max(float((model(x) - quantized(x)).detach().abs().max()) for x in batches())
    assert found["outputs"][0]["largest"] == pytest.approx(largest, rel=1e-5)


def test_a_program_is_the_same_as_itself() -> None:
    found = document("int8.qc", "int8.qc")
    assert found["sqnr"] == "inf"
    assert found["structure"]["same"]
    out = compare("int8.qc", "int8.qc").stdout
    assert "SQNR: equal" in out
    assert "every op that both have gives the same in both" in out
    assert "structure: the same, constants too" in out


def test_two_quantized_programs_say_what_they_decided_differently() -> None:
    found = document("int8.qc", "mixed.qc")
    assert found["structure"]["decisions"] == [{"node": "linear_1", "a": "static quantized by linear", "b": "float"}]
    assert not found["structure"]["same"]
    assert 20 < found["sqnr"] < 80


def test_two_float_models_show_where_they_part() -> None:
    found = document("pair_models:plain", "pair_models:turned")
    assert [row["node"] for row in found["layers"] if row["sqnr"] != "inf"] == ["linear_1"]
    assert found["outputs"][0]["largest"] == pytest.approx(0.5)
    out = compare("pair_models:plain", "pair_models:turned").stdout
    rows = [line.split() for line in out.splitlines()]
    assert any(row[:2] == ["linear_1", "linear"] for row in rows)
    assert any(line.startswith('- const %_2_bias = "2.bias"') for line in out.splitlines())
    assert "structure: 1 changed, 8 the same" in out


def test_models_of_other_widths_inside_are_compared_where_they_can_be() -> None:
    """A value of another shape is no counterpart: running an op of B on it would fail."""
    found = document("pair_models:plain", "pair_models:wider")
    assert [row["node"] for row in found["layers"]] == ["linear_1"]
    assert any("2 nodes have no counterpart" in note for note in found["notes"])


def test_the_quantized_one_may_come_first() -> None:
    found = document("int8.qc", "pair_models:plain")
    assert [row["node"] for row in found["layers"]] == ["linear", "relu", "linear_1"]
    assert 20 < found["sqnr"] < 80


def test_a_pipe_gets_plain_lines() -> None:
    result = compare("pair_models:plain", "int8.qc")
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0] == "int8.qc against pair_models:plain"
    for start in ("A: Sequential, canonical", "B: Sequential, folded for x86", "SQNR: ", "outputs: output 0: "):
        assert any(line.startswith(start) for line in lines), start
    assert "note: the inputs are the example inputs alone: give --data for more" in lines
    # that one is quantized is told in counts; the lines come with --diff
    assert not any(line.startswith("+ %") for line in lines)
    assert "\x1b" not in result.output
    assert "+ %quantize_per_tensor" in compare("pair_models:plain", "int8.qc", "--diff").stdout


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_inputs_come_from_data_or_the_factory_or_the_examples(saved: Path) -> None:
    np.savez(saved / "data.npz", np.random.default_rng(0).standard_normal((70, 4)).astype(np.float32))
    assert document("float.qc", "int8.qc", "--data", "data.npz")["batches"] == 3
    assert document("float.qc", "int8.qc", "--data", "data.npz", "--batches", "2")["batches"] == 2
    own = document("pair_models:with_batches", "int8.qc")
    assert own["measured_on"] == "3 batches, those of pair_models:with_batches"
    assert document("int8.qc", "pair_models:with_batches")["batches"] == 3
    examples = document("float.qc", "int8.qc")
    assert examples["measured_on"] == "the example inputs"
    assert any("the example inputs alone" in note for note in examples["notes"])


def test_noise_is_seeded_and_said_to_be_noise(saved: Path) -> None:
    found = document("float.qc", "int8.qc", "--noise", "3")
    assert found == document("float.qc", "int8.qc", "--noise", "3")
    assert found["measured_on"] == "3 batches of noise like the example inputs"
    assert any("says little about real inputs" in note for note in found["notes"])
    program = qc.load(saved / "float.qc")
    made = [leaves[0] for leaves in noise_like(program, "float.qc", 1, 3)]
    assert found["sqnr"] == pytest.approx(qc.compare(program, qc.load(saved / "int8.qc"), made).sqnr, abs=1e-6)


def test_arguments_by_name_and_outputs_without_floats(saved: Path) -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * scale, x.argmax(1)

    qc.capture(Named(), (torch.randn(2, 4),), example_kwargs={"scale": torch.tensor(2.0)}).save(saved / "named.qc")
    found = document("named.qc", "named.qc", "--noise", "2")
    assert [row["sqnr"] for row in found["outputs"]] == ["inf", "nan"]
    assert any("output 1 holds no floats" in note for note in found["notes"])


# -- exit codes -------------------------------------------------------------------------------------------------------


def test_too_far_apart_is_an_exit_code_of_its_own() -> None:
    near, far = ("float.qc", "int8.qc", "--at-least", "20"), ("float.qc", "int8.qc", "--at-least", "90")
    assert document(*near)["is_near"]
    assert not document(*far, code=3)["is_near"]
    result = compare(*far)
    assert result.exit_code == 3
    assert "int8.qc is not within 90 dB of float.qc" in result.stderr
    assert "SQNR: " in result.stdout


def test_equal_is_near_whatever_is_asked_and_nan_never_is() -> None:
    assert compare("int8.qc", "int8.qc", "--at-least", "500").exit_code == 0
    # NaN on both sides is no difference, and NaN on one side is
    data = ("--data", "pair_models:below_zero", "--at-least", "-99")
    assert compare("pair_models:root", "pair_models:root", *data).exit_code == 0
    assert document("pair_models:absolute", "pair_models:root", *data, code=3)["sqnr"] == "nan"


def test_data_and_noise_do_not_go_together() -> None:
    result = compare("float.qc", "int8.qc", "--data", "pair_models:batches", "--noise", "2")
    assert result.exit_code == 2
    assert "not both" in result.stderr


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (("float.qc", "missing.qc"), "no such file: missing.qc"),
        (("float.qc", "missing.onnx"), "no such file: missing.onnx"),
        (("pair_models:plain", "pair_models:longer"), r"output 0 is [2, 3] and [2, 4]"),
        (("pair_models:plain", "pair_models:two_inputs"), "take different inputs"),
        (("lowered.qc", "pair_models:longer"), r"output 0 is [2, 3] and [2, 4]"),
        (("nothing", "float.qc"), "is not a source of programs"),
        (("float.qc", "int8.qc", "--data", "pair_models:none"), "zero batches"),
    ],
)
def test_what_cannot_be_compared_is_refused(sources: tuple[str, ...], said: str) -> None:
    assert said in refuse(*sources)


def test_a_program_without_examples_needs_data(saved: Path) -> None:
    program = qc.load(saved / "float.qc")
    program.example_inputs = None
    program.save(saved / "bare.qc")
    assert "has no example inputs" in refuse("bare.qc", "bare.qc")
    assert "has no example inputs" in refuse("bare.qc", "bare.qc", "--noise", "2")
    assert document("bare.qc", "bare.qc", "--data", "pair_models:batches")["sqnr"] == "inf"


# -- what is lowered --------------------------------------------------------------------------------------------------


def test_a_lowered_program_is_compared_by_what_its_kernels_yield(saved: Path) -> None:
    found = document("int8.qc", "lowered.qc", "--data", "pair_models:batches")
    program, lowered = qc.load(saved / "int8.qc"), qc.load(saved / "lowered.qc")
    assert isinstance(lowered, qc.Lowered)
    largest = max(float((program(x) - lowered(x)).detach().abs().max()) for x in batches())
    assert found["outputs"][0]["largest"] == pytest.approx(largest, rel=1e-5, abs=1e-9)
    assert found["layers"] is None
    assert found["structure"] is None
    assert found["b"]["what"] == "Sequential, lowered for x86"
    out = compare("int8.qc", "lowered.qc").stdout
    assert "note: ops are not compared one by one" in out


@pytest.mark.parametrize("suffix", ["onnx", pytest.param("pte", marks=pytest.mark.slow)])
def test_files_of_runtimes_are_compared_by_what_they_yield(saved: Path, suffix: str) -> None:
    pytest.importorskip("onnxruntime" if suffix == "onnx" else "executorch")
    backend = "onnx" if suffix == "onnx" else "executorch"
    result = qc.quantize(qc.load(saved / "float.qc"), None, batches(), backend=backend)
    qc.lower(result.program, backend).save(saved / f"model.{suffix}")
    result.save(saved / f"{suffix}.qc")
    found = document(f"{suffix}.qc", f"model.{suffix}", "--data", "pair_models:batches")
    # a step of the output's grid, or nothing, is all that a runtime may be off by
    step = max(float(result.program(x).abs().max()) for x in batches()) / 100
    assert found["outputs"][0]["largest"] <= step
    assert document("pair_models:plain", f"model.{suffix}", "--data", "pair_models:batches")["sqnr"] > 20
    assert "neither A nor B says how its inputs are arranged" in refuse(f"model.{suffix}", f"model.{suffix}")
    (saved / f"broken.{suffix}").write_bytes(b"no model")
    refuse(f"{suffix}.qc", f"broken.{suffix}")
    assert "yield different things" in refuse("pair_models:longer", f"model.{suffix}")


def test_a_model_of_other_inputs_than_a_file_of_a_runtime_is_refused(saved: Path) -> None:
    pytest.importorskip("onnxruntime")
    result = qc.quantize(qc.load(saved / "float.qc"), None, batches(), backend="onnx")
    qc.lower(result.program, "onnx").save(saved / "one.onnx")
    assert "takes 1 tensors, and the program 2" in refuse("pair_models:two_inputs", "one.onnx")
