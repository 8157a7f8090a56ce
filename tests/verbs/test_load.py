"""`qc.load`: what a file holds is what comes back, and other files are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import quantc as qc
from quantc.errors import LoadError
from quantc.ir.program import Program
from quantc.targets.executorch.pte_container import MAGIC
from quantc.targets.kernels.lowered import Lowered
from quantc.verbs.load import load
from tests.support.store_files import calibrated, images


@pytest.fixture(scope="module")
def quantized() -> Program:
    return qc.convert(calibrated())


def test_a_program_comes_back_as_a_program(quantized: Program, tmp_path: Path) -> None:
    quantized.save(tmp_path / "net.qc")
    for path in (tmp_path / "net.qc", str(tmp_path / "net.qc")):
        again = load(path)
        assert isinstance(again, Program)
        assert again.dump() == quantized.dump()
        assert torch.equal(again(images(3)), quantized(images(3)))


def test_a_lowered_module_comes_back_on_its_kernels_or_as_its_program(quantized: Program, tmp_path: Path) -> None:
    lowered = qc.lower(quantized, "x86")
    lowered.save(tmp_path / "net.qc")
    again = load(tmp_path / "net.qc")
    assert isinstance(again, Lowered)
    assert [row.kernel for row in again.placed] == [row.kernel for row in lowered.placed]
    assert torch.equal(again(images(3)), lowered(images(3)))
    assert isinstance(load(tmp_path / "net.qc", portable=True), Program)


@pytest.mark.parametrize("name", ["net.onnx", "NET.ONNX"])
def test_onnx_files_are_for_its_runtime(name: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="ONNX") as caught:
        load(tmp_path / name)
    assert "InferenceSession" in str(caught.value.advice)


@pytest.mark.parametrize("name", ["net.pte", "net.bin"])
def test_a_file_of_executorch_holds_no_program_whatever_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\0\0\0\0" + MAGIC + bytes(64))
    with pytest.raises(LoadError, match=r"\.pte") as caught:
        load(tmp_path / name, portable=True)
    assert name in str(caught.value.where)


def test_files_that_are_missing_folders_or_something_else_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.qc").write_text("nothing of the kind")
    for name in ("missing.qc", ".", "notes.qc"):
        with pytest.raises(LoadError) as caught:
            load(tmp_path / name)
        assert (tmp_path / name).name in str(caught.value)
