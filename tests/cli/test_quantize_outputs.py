"""The files of `quantc quantize --out`: planned and checked before any work is done, and written after it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quantc as qc
from quantc.cli import quantize_outputs
from quantc.cli.app import app
from quantc.cli.quantize_outputs import Delivered, check_out, deliver, plan_outputs
from quantc.cli.run_quantize import Done
from quantc.errors import ConfigError, QuantcError
from quantc.pipeline.registry import BACKENDS
from quantc.targets.target import Target
from tests.support import cli_sources as sources
from tests.support.faulty_targets import Names, Uncallable, Unsaved, Untold, Unwritten, erase_all, registered


@pytest.fixture(scope="module")
def done() -> Done:
    return Done(qc.quantize(sources.any_size(), None, sources.batches(), "x86"), None)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_outputs, "ROUNDS", 1)


@pytest.mark.parametrize(
    ("out", "backend", "files"),
    [
        ("net.qc", "x86", {"program": "net.qc", "artifact": "net.x86.qc", "report": "net.html"}),
        ("net", "x86", {"program": "net", "artifact": "net.x86.qc", "report": "net.html"}),
        ("net.qc", "onnx", {"program": "net.qc", "artifact": "net.onnx", "report": "net.html"}),
        ("net.onnx", "onnx", {"program": "net.qc", "artifact": "net.onnx", "report": "net.html"}),
        ("net.pte", "executorch", {"program": "net.qc", "artifact": "net.pte", "report": "net.html"}),
        ("net.qc", "of_my_own", {"program": "net.qc", "report": "net.html"}),
    ],
)
def test_files_lie_side_by_side_under_one_name(out: str, backend: str, files: dict[str, str]) -> None:
    found = plan_outputs(Path("folder") / out, backend)
    assert {output.what: str(output.path) for output in found} == {
        what: str(Path("folder") / name) for what, name in files.items()
    }


def test_files_are_announced_before_any_work(tmp_path: Path) -> None:
    said: list[str] = []
    check_out(tmp_path / "net.qc", BACKENDS["x86"], "qdq", said.append)
    (told,) = said
    assert all(name in told for name in ("net.qc (program)", "net.x86.qc (artifact)", "net.html (report)"))
    check_out(None, BACKENDS["x86"], "qdq", said.append)
    assert len(said) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "backend", "to", "word"),
    [
        ("net.html", "x86", "qdq", "report"),
        ("net.onnx", "x86", "qdq", "x86"),
        ("net.onnx", "onnx", "integer", "integer"),
        ("net.pte", "openvino", "qdq", "quantized for openvino"),
        ("net.onnx", "executorch", "qdq", "quantized for executorch"),
        ("net.tflite", "x86", "qdq", "tflite"),
        ("net.zip", "x86", "qdq", "zip"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(
    out: str, backend: str, to: str, word: str, tmp_path: Path
) -> None:
    said: list[str] = []
    with pytest.raises((QuantcError, ConfigError), match=word) as caught:
        check_out(tmp_path / out, BACKENDS[backend], to, said.append)
    assert caught.value.advice
    assert said == []


def test_everything_is_written_and_timed(done: Done, tmp_path: Path) -> None:
    said: list[str] = []
    found = deliver(done, tmp_path / "new" / "net.qc", said.append)
    names = {what: path.name for what, path in found.files}
    assert names == {"program": "net.qc", "artifact": "net.x86.qc", "report": "net.html"}
    assert all(path.is_file() for _, path in found.files)
    x = sources.listed[0]
    assert qc.load(tmp_path / "new" / "net.qc")(x).equal(done.result(x))
    assert found.done.result.report.speed is not None
    assert done.result.report.speed is None, "what was given is left as it was"
    assert not found.is_elsewhere
    assert found.to_data()["files"]["report"].endswith("net.html")


def test_without_a_file_it_is_timed_alone(done: Done) -> None:
    found = deliver(done, None, lambda _: None)
    assert found.files == ()
    assert found.artifact is not None
    assert found.why_not == ""


def test_a_lowering_that_was_not_asked_for_by_name_may_fail(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise QuantcError("it does not go")

    monkeypatch.setattr(quantize_outputs, "lower", fail)
    found = deliver(done, tmp_path / "net.qc", lambda _: None)
    assert "it does not go" in found.why_not
    assert {what for what, _ in found.files} == {"program", "report"}
    assert found.to_data()["artifact"] is None
    with pytest.raises(QuantcError, match="it does not go"):
        deliver(done, tmp_path / "net.onnx", lambda _: None)


def test_a_file_of_another_runtime_is_elsewhere(done: Done) -> None:
    found = Delivered(done, artifact=object(), files=(("program", Path("net.qc")), ("artifact", Path("net.pte"))))
    assert found.is_elsewhere
    assert not Delivered(done, artifact=object(), files=(("program", Path("net.qc")),)).is_elsewhere


@pytest.mark.parametrize("backend", ["onnx", "openvino", "tensorrt"])
def test_backends_write_the_files_of_their_target(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    said: list[str] = []
    check_out(tmp_path / "net.onnx", BACKENDS[backend], "qdq", said.append)
    assert "net.onnx (artifact)" in said[0]


def test_a_backend_without_a_target_writes_programs_alone(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    said: list[str] = []
    plain = replace(BACKENDS["qnnpack"], name="plain")
    for ending in ("onnx", "pte"):
        if find_spec({"onnx": "onnx", "pte": "executorch"}[ending]):
            with pytest.raises(QuantcError, match="quantized for plain"):
                check_out(tmp_path / f"net.{ending}", plain, "qdq", said.append)
    check_out(tmp_path / "net.qc", plain, "qdq", said.append)
    check_out(tmp_path / "net.onnx", replace(plain, target="onnx"), "qdq", said.append)


def quantize(out: Path, *more: str) -> Any:
    source = "tests.support.cli_sources:complete"
    return CliRunner().invoke(app, ["quantize", source, "--backend", "npu", "--out", str(out), *more])


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS.session, "npu", replace(BACKENDS["qnnpack"], name="npu"))


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(
    ("lower", "told"),
    [
        (Unsaved, "failed: KeyError: 'no slot is free'"),
        (Unwritten, "was saved, and there is no"),
        (lambda program: 1 / 0, "lowering to npu failed: ZeroDivisionError"),
        (Untold, "to_data() of what npu lowers to failed: TypeError"),
    ],
)
def test_what_an_artifact_raises_is_told_without_a_traceback(lower: Any, told: str, tmp_path: Path) -> None:
    with registered(Target("npu", lower, suffix=".npu")):
        found = quantize(tmp_path / "m.npu", "--json")
    assert (found.exit_code, type(found.exception)) == (1, SystemExit)
    assert told in json.loads(found.stdout)["error"]["what"]


@pytest.mark.usefixtures("npu")
def test_what_raises_when_called_is_written_and_not_timed(tmp_path: Path) -> None:
    with registered(Target("npu", Uncallable, suffix=".npu")):
        found = quantize(tmp_path / "m.npu", "--json")
    data = json.loads(found.stdout)
    assert data["not_lowered"].startswith(
        "speed not measured: calling what npu lowers to failed: RuntimeError: the device"
    )
    assert (tmp_path / "m.npu").exists()


@pytest.mark.usefixtures("npu")
def test_a_target_without_files_may_give_what_cannot_be_saved(tmp_path: Path) -> None:
    with registered(Target("npu", lambda program: program.name)):
        found = quantize(tmp_path / "m.qc", "--json")
    data = json.loads(found.stdout)
    assert found.exit_code == 0
    assert "not written: what npu lowers to cannot be saved" in data["not_lowered"]
    assert sorted(data["files"]) == ["program", "report"]


@pytest.mark.usefixtures("npu")
def test_files_are_not_written_from_the_integer_form(tmp_path: Path) -> None:
    with registered(Target("npu", Names, suffix=".npu")):
        found = quantize(tmp_path / "m.qc", "--to", "integer", "--json")
    data = json.loads(found.stdout)
    assert (found.exit_code, data["artifact"]) == (0, None)
    assert "is in integer form, and .npu files are written from the Q/DQ form" in data["not_lowered"]
    assert not (tmp_path / "m.npu").exists()


@pytest.mark.usefixtures("npu")
def test_the_program_beside_it_is_the_one_that_was_lowered(tmp_path: Path) -> None:
    with registered(Target("npu", erase_all, suffix=".npu")):
        found = quantize(tmp_path / "m.npu", "--json")
    assert found.exit_code == 0, found.output
    kept = qc.load(tmp_path / "m.qc")
    assert kept.name != "overwritten"
    assert json.loads((tmp_path / "m.npu").read_text()) == Names(kept).ops
