"""Files that are not honest `.pt2` archives: of another kind, incomplete, or damaged. Each says what is wrong."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantc.capture.pt2.archive import load_exported
from quantc.errors import LoadError
from tests.support.archives import MODEL, SAMPLES, edited, members_of, saved, small_program, zipped


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
    "directory": (Path.mkdir, "directory", "inside"),
    "pipe": (os.mkfifo, "pipe", "file"),
    "missing": (lambda path: None, "cannot be read", "name"),
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


HONEST = saved(small_program())


def refused(data: bytes, folder: Path) -> LoadError:
    file = folder / "damaged.pt2"
    file.write_bytes(data)
    with pytest.raises(LoadError) as caught:
        load_exported(file)
    return caught.value


def test_missing_member_is_named(tmp_path: Path) -> None:
    members = members_of(HONEST)
    del members["data/weights/weight_0"]
    assert "data/weights/weight_0" in str(refused(zipped(members), tmp_path))


def test_other_schema_version(tmp_path: Path) -> None:
    error = refused(edited(HONEST, {MODEL: lambda document: document["schema_version"].update(major=99)}), tmp_path)
    assert "format 99" in error.what
    assert torch.__version__ in error.what


def test_several_programs(tmp_path: Path) -> None:
    members = members_of(HONEST)
    assert "2 programs (model, other)" in refused(zipped({**members, "models/other.json": b"{}"}), tmp_path).what


def test_unregistered_operator_says_what_to_import(tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.torchvision_like.nms.default"

    assert "import the package" in refused(edited(HONEST, {MODEL: edit}), tmp_path).what


def loads_or_refuses(data: bytes, folder: Path) -> None:
    file = folder / "damaged.pt2"
    file.write_bytes(data)
    with contextlib.suppress(LoadError):
        load_exported(file)


@settings(max_examples=150)
@given(flips=st.lists(st.tuples(st.integers(0, len(HONEST) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes(flips: list[tuple[int, int]], tmp_path: Path) -> None:
    data = bytearray(HONEST)
    for place, mask in flips:
        data[place] ^= mask
    loads_or_refuses(bytes(data), tmp_path)


@settings(max_examples=60)
@given(length=st.integers(0, len(HONEST) - 1))
def test_truncated(length: int, tmp_path: Path) -> None:
    refused(HONEST[:length], tmp_path)


@settings(max_examples=100)
@given(
    member=st.sampled_from(sorted(members_of(HONEST))),
    place=st.integers(0, 1 << 16),
    patch=st.binary(min_size=1, max_size=8),
)
def test_patched_member(member: str, place: int, patch: bytes, tmp_path: Path) -> None:
    """Damage inside a member, with checksums made right again, so that it reaches the readers behind them."""
    members = members_of(HONEST)
    content = bytearray(members[member] or b"\0")
    start = place % len(content)
    content[start : start + len(patch)] = patch
    loads_or_refuses(zipped({**members, member: bytes(content)}), tmp_path)


def test_samples_that_are_not_a_pickle(tmp_path: Path) -> None:
    for data in (b"PK", b"noise", pickle.dumps(1), HONEST):
        assert SAMPLES in str(refused(edited(HONEST, {}, {SAMPLES: data}), tmp_path))


def test_messages_cannot_rewrite_the_terminal(tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = "\x1b[2J\x1b[1;31mall is well\r"

    assert "\x1b" not in str(refused(edited(HONEST, {MODEL: edit}), tmp_path))
