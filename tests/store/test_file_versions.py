"""Versions of program files: which one is written, and which are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import quantc as qc
from quantc.errors import LoadError
from quantc.files import sealed_tensors
from quantc.files.sealed_tensors import FileKind
from quantc.store import file_versions
from quantc.store.file_versions import FIELD, LOWERED, PROGRAM, READ, VERSION, digest
from tests.support.paths import ROOT

TENSORS = {"b": torch.arange(6, dtype=torch.int8).reshape(2, 3), "a": torch.tensor([0.5, -0.0])}


def version_of(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        found = json.loads(file.metadata()[FIELD])["version"]
    assert isinstance(found, int)
    return found


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("version", READ)
def test_each_version_is_read_into_memory_of_its_own(version: int, tmp_path: Path) -> None:
    path = tmp_path / "model.qc"
    file_versions.write(path, TENSORS, version=version)
    assert version_of(path) == version
    found = file_versions.read(path)
    assert same(found)
    found["a"].zero_()
    assert same(file_versions.read(path))


def test_programs_and_what_they_are_lowered_to_have_versions_of_their_own(tmp_path: Path) -> None:
    """An earlier quantc, which does not know lowered modules, must not take one for a program."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval(), torch.randn(2, 4)
    program = qc.quantize(model, (x,), [x], "x86").program
    program.save(tmp_path / "program.qc")
    qc.lower(program, "x86").save(tmp_path / "lowered.qc")
    assert version_of(tmp_path / "program.qc") == VERSION == 2
    assert version_of(tmp_path / "lowered.qc") == LOWERED == 3
    assert version_of(ROOT / "tests" / "data" / "version1.qc") == 1


def test_versions_to_come_and_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.qc"
    file_versions.write(path, TENSORS, version=max(READ) + 1)
    with pytest.raises(LoadError, match="'version' is 4") as caught:
        file_versions.read(path)
    assert "save the program again" in str(caught.value.advice)
    sealed_tensors.write(path, FileKind("quantc.other", READ, "other", ""), TENSORS, VERSION)
    with pytest.raises(LoadError, match=r"'quantc\.other', not 'quantc\.program'"):
        file_versions.read(path)


def test_digests_that_are_known_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "model.qc"
    file_versions.write(path, TENSORS, {name: digest(tensor) for name, tensor in TENSORS.items()})
    assert same(file_versions.read(path))
    whole = path.read_bytes()
    file_versions.write(path, TENSORS)
    assert path.read_bytes() == whole
    file_versions.write(path, TENSORS, {"a": digest(TENSORS["b"])})
    with pytest.raises(LoadError, match="'a' has been changed"):
        file_versions.read(path)
    assert sealed_tensors.label_of(path) == PROGRAM.format
