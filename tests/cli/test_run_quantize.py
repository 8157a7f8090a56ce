"""`quantc quantize`: where the model and the data come from, what is printed where, and the exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner, Result

import quantc as qc
from quantc.cli.app import app

MODELS = """
import torch
from torch import nn
import quantc as qc

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(3, 8)

    def forward(self, a, b):
        return torch.relu(self.left(a) + self.right(b))

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), (torch.ones(2, 4),)

def fixed():
    model, inputs = plain()
    return qc.capture(model, inputs, dynamic_shapes=None)

def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), (torch.randn(8, 64),)

def two():
    torch.manual_seed(0)
    return Two().eval(), (torch.ones(2, 4), torch.ones(2, 3))

def any_size():
    model, inputs = plain()
    return qc.capture(model, inputs, dynamic_shapes=({0: torch.export.Dim("n")},))

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(3)]

def stream():
    yield from batches()

def complete():
    return (*plain(), batches())

def training():
    model, inputs = plain()
    return model.train(), inputs

def soft():
    return nn.Softplus().eval(), (torch.ones(2, 4),)

def number():
    return 3

listed = batches()

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, *, x, scale):
        return self.fc(x) * scale

named_alone = Named().eval()
half = nn.Linear(4, 3).half().eval()
plain_alone = plain()[0]

def named():
    return Named().eval(), {"x": torch.ones(2, 4), "scale": torch.ones(2, 1)}

def pairs():
    return [(x, torch.arange(2)) for x in batches()]

def rows():
    return [{"image": x, "label": torch.arange(2)} for x in batches()]

def halves():
    return [x.half() for x in batches()]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "quantize_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("quantize_models", None)
    yield tmp_path
    sys.modules.pop("quantize_models", None)


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, ["quantize", *args])


def succeed(*args: str) -> Result:
    result = quantc(*args)
    assert result.exit_code == 0, result.output
    return result


def report(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeed(*args, "--json").stdout)
    return found


def refuse(*args: str) -> str:
    result = quantc(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "what to do: " in result.stderr
    return result.stderr


def samples(count: int, width: int = 4, seed: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


# -- the example ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch", "onnx"])
def test_the_example_keeps_its_accuracy(backend: str) -> None:
    found = report("--backend", backend)
    assert found["backend"] == backend
    accuracy = found["accuracy"]
    assert accuracy["images"] == 719
    assert accuracy["before"] > 0.99
    assert abs(accuracy["before"] - accuracy["after"]) <= 0.003
    assert found["size"]["ratio"] < 0.27
    assert found["coverage"]["int8_share"] == 1.0
    assert len([layer for layer in found["comparison"]["layers"] if layer["op"] == "conv2d"]) == 6


def test_the_example_prints_plain_lines_in_a_pipe() -> None:
    result = succeed()
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0] == "DigitsCNN, quantized for x86"
    for start in ("accuracy: float 99.", "coverage: ", "SQNR: ", "size: ", "speed: ", "time: capture"):
        assert any(line.startswith(start) for line in lines), start
    assert any(line.startswith("conv2d_3") and "down.0" in line for line in lines)
    assert "\x1b" not in result.output
    said = result.stderr.splitlines()
    assert [line for line in said if line.endswith("...")] == [
        f"{step} ..."
        for step in ("capture", "prepare", "calibrate", "convert", "compare", "measure", "lower for x86", "time")
    ]
    assert any("8 of 8 batches" in line for line in said)


# -- modes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dynamic", "weight-only"])
def test_modes_need_no_data(mode: str, folder: Path) -> None:
    found = report("quantize_models:plain", "--mode", mode, "--out", "model.qc")
    assert found["calibration"] is None
    assert found["measured_on"] == "example inputs"
    assert found["coverage"]["techniques"][mode] == 2
    linears = [row for row in found["coverage"]["rows"] if row["op"] == "linear"]
    assert {row["technique"] for row in linears} == {mode}
    again = qc.load(folder / "model.qc")
    assert again.coverage().techniques[mode] == 2


def test_batches_are_held_out_on_request() -> None:
    found = report("quantize_models:complete", "--held-out", "1")
    without = report("quantize_models:complete")
    assert found["calibration"]["batches"] == without["calibration"]["batches"] - 1
    assert (found["held_out"], without["held_out"]) == (True, False)
    assert found["comparison"]["batches"] == 1


def test_data_is_what_a_mode_is_measured_on() -> None:
    found = report("quantize_models:plain", "--mode", "dynamic", "--data", "quantize_models:batches")
    assert found["calibration"] is None
    assert (found["measured_on"], found["comparison"]["batches"]) == ("batches", 2)
    assert "SQNR: " in succeed("quantize_models:plain", "--mode", "dynamic").stdout


@pytest.mark.parametrize("mode", ["dynamic", "weight-only"])
def test_the_example_keeps_its_accuracy_in_every_mode(mode: str) -> None:
    found = report("--mode", mode)
    accuracy = found["accuracy"]
    assert abs(accuracy["before"] - accuracy["after"]) <= 0.003
    assert found["coverage"]["techniques"][mode] > 0
    assert (found["coverage"]["int8_share"] > 0) == (mode == "dynamic")


def test_specs_by_name_and_as_text(folder: Path) -> None:
    found = report("quantize_models:wide", "--spec", "INT4_GROUP", "--out", "small.qc")
    assert found["coverage"]["techniques"] == {"static": 0, "dynamic": 0, "weight-only": 2}
    whole = report("quantize_models:wide", "--mode", "weight-only", "--out", "large.qc")
    assert found["comparison"]["sqnr"] < whole["comparison"]["sqnr"]
    assert (folder / "small.qc").stat().st_size < (folder / "large.qc").stat().st_size
    by_token = report(
        "quantize_models:wide", "--mode", "dynamic", "--spec", "uint8{granularity=per-token timing=dynamic}"
    )
    assert by_token["coverage"]["techniques"]["dynamic"] == 2
    text = qc.load(folder / "small.qc").dump()
    assert "dequantize_per_channel_group" in text


def test_a_config_has_the_last_word(folder: Path) -> None:
    qc.QuantConfig().set("2", qc.FLOAT).save(folder / "config.toml")
    found = report("quantize_models:wide", "--mode", "dynamic", "--spec", "UINT8_TOKEN", "--config", "config.toml")
    techniques = {row["module"]: row["technique"] for row in found["coverage"]["rows"] if row["op"] == "linear"}
    assert techniques == {"0": "dynamic", "2": ""}


def test_what_is_static_in_a_mode_needs_data_after_all(folder: Path) -> None:
    qc.QuantConfig().set("2", qc.UINT8).save(folder / "config.toml")
    args = ("quantize_models:plain", "--mode", "dynamic", "--config", "config.toml")
    result = quantc(*args)
    assert result.exit_code == 2
    assert "come from data" in " ".join(result.stderr.split())
    assert report(*args, "--data", "quantize_models:batches")["coverage"]["techniques"]["static"] == 1


def test_explain_in_a_mode() -> None:
    args = ["explain", "quantize_models:plain", "relu", "--backend", "x86", "--mode", "dynamic", "--json"]
    found = json.loads(CliRunner().invoke(app, args).stdout)
    assert found["reason"] == "linear before it is dynamic and yields float"
    assert found["change"]["kind"] == "add-config-rule"


# -- models and data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["quantize_models:batches", "quantize_models:stream", "quantize_models:listed"])
def test_batches_from_python(data: str) -> None:
    expected = report("quantize_models:complete")
    found = report("quantize_models:plain", "--data", data)
    assert found["calibration"]["batches"] == 3
    assert found["accuracy"] is None
    assert found["calibration"]["groups"] == expected["calibration"]["groups"]


def test_a_pt2_file(folder: Path) -> None:
    model = nn.Linear(4, 2).eval()
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), folder / "linear.pt2")
    np.savez(folder / "data.npz", samples(6))
    assert report("linear.pt2", "--data", "data.npz")["coverage"]["counts"]["quantized"] == 1


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_samples_are_cut_into_batches(suffix: str, folder: Path) -> None:
    array = samples(7)
    path = folder / f"data{suffix}"
    if suffix == ".npz":
        np.savez(path, input=array)
    else:
        save_file({"input": torch.from_numpy(array)}, path)
    result = succeed("quantize_models:fixed", "--data", path.name, "--json")
    assert "note: 1 of 7 samples of input_1 do not fill a batch and are left out" in result.stderr
    found = json.loads(result.stdout)
    assert found["calibration"]["batches"] == 3
    (seen,) = [group for group in found["calibration"]["groups"] if group["where"].startswith("input")]
    assert (seen["low"], seen["high"]) == (float(array[:6].min()), float(array[:6].max()))


def test_whole_batches_and_batches_of_any_size(folder: Path) -> None:
    np.savez(folder / "whole.npz", samples(10).reshape(5, 2, 4))
    assert report("quantize_models:plain", "--data", "whole.npz")["calibration"]["batches"] == 5
    np.savez(folder / "many.npz", samples(70))
    found = report("quantize_models:any_size", "--data", "many.npz")["calibration"]
    assert (found["batches"], found["samples"]) == (3, 70)
    found = report("quantize_models:plain", "--data", "many.npz")["calibration"]
    assert (found["batches"], found["samples"]) == (3, 70)


@pytest.mark.parametrize("names", [("a", "b"), ("arr_0", "arr_1")], ids=["named", "unnamed"])
def test_several_inputs(names: tuple[str, str], folder: Path) -> None:
    left, right = samples(8), samples(8, 3, seed=2)
    arrays: dict[str, Any] = dict(zip(names, (left, right), strict=True))
    np.savez(folder / "two.npz", **dict(reversed(arrays.items())))
    groups = report("quantize_models:two", "--data", "two.npz")["calibration"]["groups"]
    seen = {group["where"]: (group["low"], group["high"]) for group in groups}
    assert seen["a"] == (float(left.min()), float(left.max()))
    assert seen["b"] == (float(right.min()), float(right.max()))


def test_a_config_file_is_followed(folder: Path) -> None:
    qc.QuantConfig().set("2", qc.FLOAT).save(folder / "config.toml")
    found = report("quantize_models:complete", "--config", "config.toml")
    (row,) = [row for row in found["coverage"]["rows"] if row["module"] == "2"]
    assert row["verdict"] == "float"
    assert "config" in row["reason"]


def test_the_result_is_written_and_reads_back(folder: Path) -> None:
    result = succeed("quantize_models:complete", "--out", "deep/model.qc")
    assert "program written to deep/model.qc" in result.stderr
    program = qc.load(folder / "deep" / "model.qc")
    assert program.stage is qc.Stage.FOLDED
    assert program(torch.ones(2, 4)).shape == (2, 3)
    found = report("quantize_models:complete", "--out", "model.qc")
    assert found["out"] == "model.qc"


def test_the_program_what_it_was_lowered_to_and_a_report_are_written(folder: Path) -> None:
    found = report("quantize_models:complete", "--out", "deep/model.qc")
    assert found["files"] == {
        "program": "deep/model.qc",
        "artifact": "deep/model.x86.qc",
        "report": "deep/model.html",
    }
    lowered = qc.load(folder / "deep" / "model.x86.qc")
    assert isinstance(lowered, qc.Lowered)
    x = torch.randn(2, 4)
    torch.testing.assert_close(lowered(x), qc.load(folder / "deep" / "model.qc")(x), rtol=0, atol=0.1)
    page = (folder / "deep" / "model.html").read_text(encoding="utf-8")
    assert "<h1>Sequential, quantized for x86</h1>" in page
    for node in ("linear", "linear_1"):
        assert f"<td>{node}</td>" in page
    assert found["coverage"]["counts"]["quantized"] >= 2
    assert f"{found['comparison']['sqnr']:.1f} dB" in page
    assert found["speed"]["target"] == "x86"
    assert min(found["speed"][key] for key in ("before", "after", "times")) > 0
    assert found["speed"]["times"] == found["speed"]["before"] / found["speed"]["after"]
    assert f"{found['speed']['times']:.2f} times as fast as float in torch" in page or found["speed"]["times"] < 0.97
    assert found["not_lowered"] is None


def test_what_is_not_asked_for_by_name_is_left_out_with_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report("quantize_models:complete", "--to", "integer", "--backend", "onnx", "--out", "model.qc")
    assert found["artifact"] is None
    assert found["speed"] is None
    assert "integer form" in found["not_lowered"]
    assert set(found["files"]) == {"program", "report"}
    monkeypatch.setitem(sys.modules, "onnx", None)
    told = succeed(
        "quantize_models:any_size", "--data", "quantize_models:batches", "--backend", "onnx", "--out", "o.qc"
    )
    assert "note: not lowered for onnx: onnx is not installed" in told.stderr
    assert (folder / "o.qc").exists()
    assert (folder / "o.html").exists()
    assert not (folder / "o.onnx").exists()


def test_a_report_is_no_program() -> None:
    assert "would hold the report, and no program" in refuse("quantize_models:complete", "--out", "model.html")


def test_a_page_shows_text_as_text(folder: Path) -> None:
    """Names come from the user's code."""
    program = qc.capture(nn.Sequential(nn.Linear(4, 4)).eval(), (torch.randn(2, 4),))
    program.name = "<script>alert(1)</script>"
    page = qc.quantize(program, None, [torch.randn(2, 4)]).report.to_html({"accuracy": "a < b"})
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<dd>a &lt; b</dd>" in page


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--backend", "toaster"], "unknown backend 'toaster'"),
        (
            ["quantize_models:plain", "--spec", "FP16_WEIGHT", "--backend", "executorch"],
            "dtype must be int8 or int4, not fp16",
        ),
        (["quantize_models:plain", "--spec", "INT4_GRUOP"], "did you mean INT4_GROUP"),
        (["quantize_models:plain", "--spec", "int4{role=wait}"], "role"),
        (["quantize_models:plain", "--spec", "INT4_GROUP"], "groups of 32 do not divide"),
        (["quantize_models:plain", "--spec", "int16{timing=dynamic}"], "cannot run int16"),
        (["quantize_models:complete", "--config", "nowhere.toml"], "nowhere.toml does not read"),
        (["quantize_models:complete", "--config", "wrong.toml"], "did you mean"),
        (["nowhere.pt2"], "no such file: nowhere.pt2"),
        (["quantize_models:plain", "--data", "nowhere.npz"], "no such file: nowhere.npz"),
        (["quantize_models:plain", "--data", "something"], "is not a source of batches"),
        (["quantize_models:plain", "--data", "quantize_models:bathces"], "did you mean batches"),
        (["quantize_models:plain", "--data", "quantize_models:number"], "cannot be gone through"),
        (["quantize_models:plain", "--data", "broken.npz"], "broken.npz cannot be read"),
        (["quantize_models:plain", "--data", "broken.safetensors"], "broken.safetensors cannot be read"),
        (["quantize_models:plain", "--data", "objects.npz"], "objects.npz cannot be read"),
        (["quantize_models:plain", "--data", "wide.npz"], "batch 0 does not fit"),
        (["quantize_models:plain", "--data", "double.npz"], "f64"),
        (["quantize_models:plain", "--data", "flat.npz"], "has 1 dimensions"),
        (["quantize_models:fixed", "--data", "one.npz"], "holds 1 samples, and a batch is 2"),
        (["quantize_models:two", "--data", "ac.npz"], "the arrays are a, c"),
        (["quantize_models:two", "--data", "uneven.npz"], "different numbers of samples"),
        (["quantize_models:plain", "--data", "nan.npz"], "NaN"),
        (["quantize_models:training", "--data", "quantize_models:batches"], "training mode"),
        (["quantize_models:soft", "--data", "quantize_models:batches"], "nothing was quantized"),
    ],
    ids=lambda value: "-".join(value[:3]).replace("quantize_models:", "") if isinstance(value, list) else "",
)
def test_refusals_say_what_to_do(args: list[str], says: str, folder: Path) -> None:
    (folder / "wrong.toml").write_text('[[rules]]\nselect = { by = "op", op = "liner" }\nuse = "FLOAT"\n')
    (folder / "broken.npz").write_bytes(b"PK not really")
    (folder / "broken.safetensors").write_bytes(b"no")
    np.savez(folder / "objects.npz", np.array([{}, []], dtype=object))
    np.savez(folder / "wide.npz", samples(4, 5))
    np.savez(folder / "double.npz", samples(4).astype(np.float64))
    np.savez(folder / "flat.npz", samples(4)[0])
    np.savez(folder / "one.npz", samples(1))
    np.savez(folder / "ac.npz", a=samples(4), c=samples(4, 3))
    np.savez(folder / "uneven.npz", a=samples(4), b=samples(8, 3))
    np.savez(folder / "nan.npz", np.full((2, 4), np.nan, dtype=np.float32))
    assert says in refuse(*args)


def test_nothing_is_written_where_it_is_refused(folder: Path) -> None:
    refuse("quantize_models:soft", "--data", "quantize_models:batches", "--out", "model.qc")
    assert not (folder / "model.qc").exists()


def test_an_object_array_executes_nothing(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (folder / "sprung",))

    np.savez(folder / "trap.npz", np.array([Trap()], dtype=object))
    refuse("quantize_models:plain", "--data", "trap.npz")
    assert not (folder / "sprung").exists()


# -- ONNX -----------------------------------------------------------------------------------------------------


def test_a_file_named_onnx_is_a_model_in_onnx(folder: Path) -> None:
    import onnx
    import onnxruntime

    out = folder / "deep" / "model.onnx"
    found = report(
        "quantize_models:any_size", "--data", "quantize_models:batches", "--backend", "onnx", "--out", str(out)
    )
    assert found["out"] == str(out)
    assert found["files"]["program"] == str(out.with_suffix(".qc"))
    assert qc.load(out.with_suffix(".qc")).stage is qc.Stage.FOLDED
    assert found["speed"]["target"] == "onnx"
    assert found["speed"]["runtime"] == "ONNX Runtime"
    assert min(found["speed"][key] for key in ("runtime_before", "runtime_times")) > 0
    model = onnx.load(str(out))
    onnx.checker.check_model(model, full_check=True)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts["quantc.backend"] == "onnx"
    session = onnxruntime.InferenceSession(str(out))
    (made,) = session.run(None, {session.get_inputs()[0].name: samples(5)})
    assert np.asarray(made).shape == (5, 3)


def test_without_onnx_nothing_is_quantized_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    text = refuse("quantize_models:any_size", "--data", "quantize_models:batches", "--out", "model.onnx")
    assert "pip install 'quantc[onnx]'" in text
    assert not Path("model.onnx").exists()


def test_the_integer_form_is_not_written_in_onnx() -> None:
    text = refuse(
        "quantize_models:any_size", "--data", "quantize_models:batches", "--to", "integer", "--out", "model.onnx"
    )
    assert "integer form" in text


# -- what the model takes of the data ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["plain", "plain_alone"])
@pytest.mark.parametrize(("data", "inputs"), [("pairs", "0"), ("rows", "image")])
def test_inputs_says_what_the_model_takes_of_each_batch(source: str, data: str, inputs: str) -> None:
    wanted = report(f"quantize_models:{source}", "--data", "quantize_models:batches")
    found = report(f"quantize_models:{source}", "--data", f"quantize_models:{data}", "--inputs", inputs)
    assert found["calibration"]["batches"] == 3
    assert found["comparison"]["sqnr"] == wanted["comparison"]["sqnr"]


def test_inputs_picks_arrays_of_a_file(folder: Path) -> None:
    np.savez(folder / "labelled.npz", x=samples(8), y=np.arange(8))
    for inputs in ("x", "0"):
        assert report("quantize_models:plain", "--data", "labelled.npz", "--inputs", inputs)["held_out"] is False
    assert "did you mean x?" in refuse("quantize_models:plain", "--data", "labelled.npz", "--inputs", "X")
    assert "unknown array 7" in refuse("quantize_models:plain", "--data", "labelled.npz", "--inputs", "7")


def test_arrays_that_are_no_inputs_are_to_be_left_out(folder: Path) -> None:
    np.savez(folder / "labelled.npz", a=samples(8), b=samples(8, 3), y=np.arange(8))
    told = refuse("quantize_models:two", "--data", "labelled.npz")
    assert "leave y out of the file, or say which to take: --inputs a,b" in told
    assert "did you mean y" not in told
    assert report("quantize_models:two", "--data", "labelled.npz", "--inputs", "a,b")["calibration"]["batches"] > 0


def test_batches_with_labels_name_the_option() -> None:
    assert "on the command line --inputs 0" in refuse("quantize_models:plain", "--data", "quantize_models:pairs")
    assert "--inputs image" in refuse("quantize_models:plain", "--data", "quantize_models:rows")
    told = refuse("quantize_models:plain", "--data", "quantize_models:rows", "--inputs", "picture")
    assert "batch 0 has no 'picture': it holds image, label" in told
    assert quantc("quantize_models:plain", "--data", "quantize_models:pairs", "--inputs", "0,").exit_code == 2


def test_dtype_casts_the_model_and_the_batches() -> None:
    args = ("quantize_models:half", "--data", "quantize_models:halves")
    assert "--dtype float32" in refuse(*args)
    assert report(*args, "--dtype", "float32")["coverage"]["counts"]["quantized"] > 0
    assert "cast to float32 or not at all" in refuse(*args, "--dtype", "float16")
    assert "only models are cast" in refuse("quantize_models:fixed", "--dtype", "float32")


def test_keyword_only_models_take_arrays_by_name(folder: Path) -> None:
    np.savez(folder / "named.npz", x=samples(8), scale=samples(8, 1))
    for source in ("named", "named_alone"):
        found = report(f"quantize_models:{source}", "--data", "named.npz")
        assert found["coverage"]["counts"]["quantized"] > 0
    np.savez(folder / "unnamed.npz", samples(8), samples(8, 1))
    told = refuse("quantize_models:named_alone", "--data", "unnamed.npz")
    assert "the model takes scale, x" in told
    assert "name the arrays like the parameters of forward" in told


def test_a_model_alone_is_told_where_examples_come_from() -> None:
    told = refuse("quantize_models:plain_alone")
    assert "give --data FILE.npz or --data package.module:name" in told
    assert "(model, example_inputs)" in told
