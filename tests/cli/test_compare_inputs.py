"""Inputs A and B of `quantc compare`: what each is, and how it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import quantc as qc
from quantc.cli.compare_inputs import read_side
from quantc.errors import InputError, LoadError
from tests.support import cli_sources as sources

X = sources.listed[0]


def test_a_model_by_name_is_captured_and_keeps_its_batches() -> None:
    side = read_side(f"{sources.HERE}:complete", "auto")
    assert side.is_open
    assert side.model is not None
    assert len(side.batches) == 3
    assert torch.equal(side.run([X])[0], side.model(X))
    assert side.to_data() == {
        "source": f"{sources.HERE}:complete",
        "name": "Sequential",
        "stage": "canonical",
        "what": "Sequential, canonical",
    }


def test_a_saved_program_says_what_it_was_quantized_for(tmp_path: Path) -> None:
    sources.quantized().save(tmp_path / "net.qc")
    side = read_side(str(tmp_path / "net.qc"), "auto")
    assert side.is_open
    assert side.told.endswith("for x86")
    assert torch.equal(side.run([X])[0], sources.quantized()(X))


def test_a_lowered_module_yields_and_is_not_open(tmp_path: Path) -> None:
    lowered = qc.lower(sources.quantized(), "x86")
    lowered.save(tmp_path / "net.qc")
    side = read_side(str(tmp_path / "net.qc"), "auto")
    assert not side.is_open
    assert side.program is not None
    assert "lowered for x86" in side.told
    assert torch.equal(side.run([X])[0], lowered(X))


def test_a_model_in_onnx_runs_on_its_runtime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "net.onnx"
    qc.lower(sources.quantized(), "onnx").save(path)
    side = read_side(str(path), "auto")
    assert side.program is None
    assert side.name == str(path)
    torch.testing.assert_close(side.run([X])[0], sources.quantized()(X), atol=0.05, rtol=0)
    with pytest.raises(InputError, match="1 tensors, and the program 2"):
        side.run([X, X])
    with pytest.raises(InputError, match="batch"):
        side.run([X[:, :3]])


def test_a_file_that_the_runtime_cannot_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "net.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(LoadError) as caught:
        read_side(str(tmp_path / "net.onnx"), "auto")
    assert "net.onnx" in str(caught.value.where)


@pytest.mark.parametrize("name", ["net.qc", "net.onnx", "net.pte"])
def test_files_that_are_not_there_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=name):
        read_side(str(tmp_path / name), "auto")


def test_examples_are_for_models_that_have_none() -> None:
    def examples(model: Any) -> tuple[Any, ...]:
        return (torch.zeros(3, 4),)

    side = read_side(f"{sources.HERE}:alone", "auto", examples)
    assert side.program is not None
    assert [tuple(tensor.shape) for tensor in side.program.example_inputs or ()] == [(3, 4)]
