"""File suffixes: what others would take for another format is refused, and the call that writes it is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import SaveError
from quantc.files.endings import ENDINGS, check_ending


def converted(backend: str = "x86") -> qc.Result:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    return qc.quantize(model, (torch.ones(2, 4),), [torch.randn(2, 4)], backend)


@pytest.mark.parametrize("name", ["m.onnx", "m.pt", "m.pth", "m.PT2", "m.pte", "m.safetensors", "m.json", "m.tflite"])
def test_names_of_other_formats_are_refused(name: str, tmp_path: Path) -> None:
    result = converted()
    for save in (result.save, result.program.save, qc.lower(result.program, "x86").save):
        with pytest.raises(SaveError, match="would be taken for") as caught:
            save(tmp_path / name)
        assert "name it m.qc" in str(caught.value.advice)
    assert not (tmp_path / name).exists()
    if name == "m.onnx":
        assert 'qc.lower(program, "onnx").save(' in str(caught.value.advice)


def test_artifacts_have_their_own_names_too(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    model = qc.lower(converted("onnx").program, "onnx")
    with pytest.raises(SaveError, match="would be taken for a program of quantc's"):
        model.save(tmp_path / "model.qc")
    with pytest.raises(SaveError, match="would be taken for an ONNX model, and this writes statistics"):
        calibrate().statistics.save(tmp_path / "seen.onnx")


def calibrate() -> qc.CalibrationReport:
    prepared = qc.prepare(qc.capture(nn.Sequential(nn.Linear(4, 8)).eval(), (torch.ones(2, 4),)), "x86")
    return qc.calibrate(prepared, [torch.randn(2, 4)])


def test_own_and_unknown_suffixes_pass() -> None:
    for name in ("model.qc", "model.QC", "model", "model.bin", "archive.tar.unknown"):
        check_ending(Path(name), (".qc", ""), "a program")


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_suffix_of_others_is_told_with_a_name_of_ones_own_and_with_the_call(ending: str) -> None:
    with pytest.raises(SaveError, match="and this writes a thing") as caught:
        check_ending(Path("folder") / f"model{ending.upper()}", (".own",), "a thing")
    advice = str(caught.value.advice)
    assert "name it model.own" in advice
    assert "{" not in advice, "every placeholder is filled"
    assert caught.value.where == f"folder/model{ending.upper()}"


def test_the_advice_names_the_path_that_was_given() -> None:
    with pytest.raises(SaveError) as caught:
        check_ending(Path("folder/model.onnx"), (".qc",), "a program")
    assert 'qc.lower(program, "onnx").save("folder/model.onnx")' in str(caught.value.advice)
    with pytest.raises(SaveError) as caught:
        check_ending(Path("folder/model.ort"), (".qc",), "a program")
    assert 'save("folder/model.onnx")' in str(caught.value.advice), "ONNX Runtime makes its own file of that one"


def test_a_file_without_a_suffix_of_its_own_is_named_without() -> None:
    with pytest.raises(SaveError, match="would be taken for a pickle") as caught:
        check_ending(Path("model.pkl"), ("",), "text")
    assert "name it model;" in str(caught.value.advice)
