"""Files are read if they are what was written: damaged, cut and foreign ones are told."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import InputError, LoadError
from quantc.targets import executorch
from quantc.targets.executorch.pte_container import SEALED, seal_pte
from tests.support.executorch_models import conv, image, static


@pytest.fixture(scope="module")
def written() -> executorch.Pte:
    return qc.lower(static(conv(), image()), "executorch")


@pytest.mark.parametrize("where", ["first", "half", "last", "flipped", "seal", "other", "empty"])
def test_damaged_files_are_refused(written: executorch.Pte, where: str, tmp_path: Path) -> None:
    path = tmp_path / "digits.pte"
    written.save(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    broken = {
        "first": whole[:20],
        "half": whole[: len(whole) // 2],
        "last": whole[: -SEALED - 1],
        "flipped": bytes(flipped),
        "seal": whole[:-SEALED] + bytes(32) + whole[-8:],
        "other": b"PK" + whole[2:8] + b"nothing",
        "empty": b"",
    }
    path.write_bytes(broken[where])
    with pytest.raises(LoadError):
        executorch.load(path)


def test_a_file_of_another_length_or_without_its_seal_is_refused(written: executorch.Pte, tmp_path: Path) -> None:
    content = written.content
    path = tmp_path / "model.pte"
    path.write_bytes(content)
    with pytest.raises(LoadError, match="lost its seal"):
        executorch.load(path)
    wrong = bytearray(content)
    wrong[64:512] = bytes(448)
    path.write_bytes(bytes(wrong))
    with pytest.raises(LoadError):
        executorch.load(path).run(image())
    for changed in (seal_pte(content) + b"garbage", seal_pte(content)[:-3], seal_pte(content)[:-8], content + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(LoadError, match="not what was sealed"):
            qc.load(path)
    with pytest.raises(LoadError, match=r"nothing\.pte"):
        executorch.load(tmp_path / "nothing.pte")


def test_what_was_written_is_read_and_runs(written: executorch.Pte, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    written.save(path)
    for place in (path, str(path)):
        found = executorch.load(place)
        assert found.metadata == written.metadata
        assert found.content == written.content
        assert torch.equal(found(image()), written(image()))


def test_files_of_other_writers_are_read_without_a_word_of_themselves(written: executorch.Pte, tmp_path: Path) -> None:
    """Exported by ExecuTorch alone: no seal, no metadata, tensors one after the other."""
    to_edge: Any = import_module("executorch.exir").to_edge
    made = to_edge(torch.export.export(nn.ReLU(), (torch.ones(3),))).to_executorch().buffer
    (tmp_path / "other.pte").write_bytes(made)
    found = executorch.load(tmp_path / "other.pte")
    assert found.metadata is None
    assert found(torch.tensor([-1.0, 0.0, 2.0])).tolist() == [0.0, 0.0, 2.0]
    with pytest.raises(InputError, match="one after the other, not input="):
        found(input=torch.ones(3))


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(LoadError, match="NoneType"):
        executorch.load(None)  # type: ignore[arg-type]
