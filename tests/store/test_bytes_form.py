"""Files as bytes: what is pickled is what `save` writes, and nothing is left on the disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from quantc.errors import LoadError
from quantc.ir.program import Program
from quantc.store.bytes_form import as_bytes, from_bytes, program_of
from tests.support.by_hand import two_layers


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("content", [b"", b"\0\r\n\xff" * 3])
def test_bytes_go_to_a_file_and_come_back(content: bytes, temporary: Path) -> None:
    seen: list[Path] = []

    def save(path: Path) -> None:
        assert path.parent.parent == temporary
        seen.append(path)
        path.write_bytes(content)

    def load(path: Path) -> bytes:
        seen.append(path)
        return path.read_bytes()

    assert as_bytes(save) == content
    assert from_bytes(content, load) == content
    assert len(set(seen)) == 2, "calls do not share a file"
    assert list(temporary.iterdir()) == []


def test_nothing_is_left_where_saving_or_loading_fails(temporary: Path) -> None:
    def fail(path: Path) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        as_bytes(fail)
    with pytest.raises(ValueError, match="no"):
        from_bytes(b"x", fail)
    assert list(temporary.iterdir()) == []


def test_a_program_is_the_bytes_of_its_file(tmp_path: Path) -> None:
    program = two_layers()
    content = as_bytes(program.save)
    program.save(tmp_path / "model.qc")
    assert content == (tmp_path / "model.qc").read_bytes()
    again = program_of(content)
    assert isinstance(again, Program)
    assert again.dump() == program.dump()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again(x), program(x))


def test_bytes_that_are_no_program_are_refused() -> None:
    content = as_bytes(two_layers().save)
    for wrong in (b"", content[:-1], content[:200] + b"\0" + content[201:]):
        with pytest.raises(LoadError):
            program_of(wrong)
