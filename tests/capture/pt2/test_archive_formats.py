"""Files of other kinds are told by their bytes alone, and nothing in them is run."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quantc.capture.pt2.archive import load_exported
from quantc.capture.pt2.archive_formats import why_not_archive
from quantc.errors import LoadError
from tests.support.archives import Touch, pickled, zipped


def write(data: bytes) -> Callable[[Path], None]:
    def to(path: Path) -> None:
        path.write_bytes(data)

    return to


def torchscript(path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2)), path)  # type: ignore[no-untyped-call]


def legacy_pickle(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def older_export(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.1")
        archive.writestr("serialized_exported_program.json", "{}")


OTHERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "empty": (write(b""), "empty", "again"),
    "text": (write(b"def forward(x):\n    return x\n"), "text file", "torch.export.save"),
    "unicode text": (write(("é" * 3000).encode()), "text file", "torch.export.save"),
    "noise": (write(bytes(range(1, 32)) * 50), "does not know", "torch.export.save"),
    "torchscript": (torchscript, "TorchScript", "original model"),
    "state dict": (lambda path: torch.save(nn.Linear(2, 2).state_dict(), path), "state dict", "load_state_dict"),
    "module": (lambda path: torch.save(nn.Linear(2, 2), path), "torch.nn.modules.linear.Linear", "trust"),
    "pickle": (write(pickle.dumps([1, 2])), "pickle", "trust"),
    "old torch.save": (legacy_pickle, "pickle", "trust"),
    "old export": (older_export, "2.7", "again"),
    "npz": (lambda path: np.savez(path.open("wb"), a=np.ones(2)), "zip file without", "torch.export.save"),
    "shared library": (write(b"\x7fELF\x02\x01\x01"), "compiled code", "torch.export.save"),
    "executorch": (write(b"\x1c\0\0\0ET12" + bytes(64)), "ExecuTorch", "torch.export.save"),
    "safetensors": (write((2).to_bytes(8, "little") + b"{}"), "safetensors", "build the model"),
    "zip start": (write(b"PK\x03\x04" + bytes(40)), "cut short", "again"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_files(kind: str, tmp_path: Path) -> None:
    make, says, advice = OTHERS[kind]
    path = tmp_path / "file.pt2"
    make(path)
    with pytest.raises(LoadError) as caught:
        load_exported(path)
    assert says in caught.value.what
    assert advice in (caught.value.advice or "")
    assert str(path) in (caught.value.where or "")


def told(data: bytes) -> str:
    """What is said about bytes, and that the stream is where it was: somebody reads it next."""
    stream = io.BytesIO(data)
    found = why_not_archive(stream)
    assert stream.tell() == 0 or data.startswith(b"PK")
    return "" if found is None else str(found)


def test_an_archive_of_torch_export_is_one() -> None:
    assert told(zipped({"archive_format": b"pt2", "models/model.json": b"{}"})) == ""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x93NUMPY\x01\x00", "NumPy"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"GGUF\x03\x00\x00\x00", "GGUF"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "does not know"),  # no header of safetensors is as long
        (zipped({"data/readme": b"x"}), "archive/data/readme"),
    ],
)
def test_kinds_are_told_by_their_first_bytes(data: bytes, words: str) -> None:
    assert words in told(data)


def test_text_cut_in_the_middle_of_a_letter_is_text() -> None:
    assert "text file" in told(b"x" + "é".encode() * 2048)  # the 4096th byte is half a letter
    assert "text file" not in told("é".encode() * 100 + b"\x00" * 50)


def test_a_pickle_is_described_without_being_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = told(pickled(Touch(marker)))
    assert "mkdir" in text
    assert "runs code" in text
    assert not marker.exists()


def test_a_damaged_pickle_is_told_as_such() -> None:
    data = pickled({"a": torch.ones(2)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    assert "state dict" in told(zipped(names))
    assert "damaged" in told(zipped({**names, "data.pkl": b"\xff\xff"}))
