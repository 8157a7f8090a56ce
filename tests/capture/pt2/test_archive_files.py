"""Files that are not honest `.pt2` archives: of another kind, incomplete, or damaged. Each says what is wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.capture.pt2.archive import load_exported
from quantc.errors import LoadError
from tests.support.archives import MODEL, edited, members_of, refused, saved, small_program, zipped

PLACES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "directory": (Path.mkdir, "directory", "inside"),
    "pipe": (os.mkfifo, "pipe", "file"),
    "missing": (lambda path: None, "cannot be read", "name"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_places_that_hold_no_file(kind: str, tmp_path: Path) -> None:
    make, says, advice = PLACES[kind]
    path = tmp_path / "file.pt2"
    make(path)
    with pytest.raises(LoadError) as caught:
        load_exported(path)
    assert says in caught.value.what
    assert advice in (caught.value.advice or "")
    assert str(path) in (caught.value.where or "")


HONEST = saved(small_program())


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


def test_messages_cannot_rewrite_the_terminal(tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = "\x1b[2J\x1b[1;31mall is well\r"

    assert "\x1b" not in str(refused(edited(HONEST, {MODEL: edit}), tmp_path))
