"""Members of a `.pt2` archive: allowed names, stored as they are, no larger than the file, and read once."""

from __future__ import annotations

import io
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from quantc.capture.pt2.archive_members import (
    Members,
    check_byte_order,
    check_entries,
    check_plain,
    inside,
    model_name,
    open_archive,
)
from quantc.errors import LoadError
from tests.support.archives import MODEL, edited, members_of, refusal, zipped
from tests.support.hostile import HONEST


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("data/aotinductor/model/model.so", "AOTInductor"),
        ("data/aotinductor/model/wrapper.cpp", "AOTInductor"),
        ("data/constants/custom_obj_0", "custom class"),
        ("data/constants/opaque_obj_0", "pickled Python object"),
        ("data/executorch/model.pte", "ExecuTorch"),
        ("data/weights/model.pt", "pickled form"),
        ("code/evil.py", "unknown kind of file"),
        ("../evil", "outside its folder"),
        ("data/../../evil", "outside its folder"),
        ("/etc/evil", "outside its folder"),
        ("data\\evil", "odd name"),
        ("data/\x07bell", "odd name"),
    ],
)
def test_foreign_members(member: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(edited(HONEST, {}, {member: b"\x7fELF"}), tmp_path)


def test_members_outside_the_root(tmp_path: Path) -> None:
    for name in ("evil", "../evil", "/evil", "other/models/model.json"):
        buffer = io.BytesIO(HONEST)
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr(name, b"x")
        refusal(buffer.getvalue(), tmp_path)


def test_member_twice(tmp_path: Path) -> None:
    buffer = io.BytesIO(zipped(members_of(HONEST)))
    with zipfile.ZipFile(buffer, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(f"archive/{MODEL}", b"{}")
    assert "twice" in refusal(buffer.getvalue(), tmp_path)


def test_zip_bomb_by_compression(tmp_path: Path) -> None:
    members = {**members_of(HONEST), "data/weights/weight_0": bytes(1 << 26)}
    data = zipped(members, zipfile.ZIP_DEFLATED)
    assert len(data) < 1 << 20
    assert "compressed" in refusal(data, tmp_path)


def test_zip_bomb_by_declared_size(tmp_path: Path) -> None:
    """The directory of the archive claims four gigabytes for a member of 48 bytes."""
    data = bytearray(zipped(members_of(HONEST)))
    entry = data.rindex(b"archive/data/weights/weight_0") - 46
    assert data[entry : entry + 4] == b"PK\x01\x02"
    data[entry + 20 : entry + 28] = (0xFFFFFFF0).to_bytes(4, "little") * 2
    assert "claims to hold" in refusal(bytes(data), tmp_path)


def test_zip_bomb_by_overlap(tmp_path: Path) -> None:
    """Many names for the same bytes: more data than the file is long."""
    buffer = io.BytesIO(zipped({**members_of(HONEST), "data/weights/weight_0": bytes(1 << 16)}))
    with zipfile.ZipFile(buffer, "a") as archive:
        source = archive.getinfo("archive/data/weights/weight_0")
        for index in range(100, 150):
            copy = zipfile.ZipInfo(f"archive/data/weights/weight_{index}")
            copy.file_size = copy.compress_size = source.file_size
            copy.CRC, copy.header_offset = source.CRC, source.header_offset
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
        archive.writestr("archive/extra/last", b"")
    assert "claims to hold" in refusal(buffer.getvalue(), tmp_path)


def members(content: dict[str, bytes]) -> Members:
    data = zipped(content)
    return Members(open_archive(io.BytesIO(data)), len(data))


def test_members_are_read_by_the_name_inside_their_folder() -> None:
    found = members({"a": b"\x01\x02", "data/b.json": b'{"x": [1]}'})
    assert found.names == ["a", "data/b.json"]
    assert (found.size("a"), found.bytes("a")) == (2, b"\x01\x02")
    assert torch.equal(found.tensor("a"), torch.tensor([1, 2], dtype=torch.uint8))
    assert found.document("data/b.json") == {"x": [1]}
    with pytest.raises(LoadError, match="missing") as caught:
        found.bytes("c")
    assert caught.value.where == "c"


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_documents_that_are_not_json_are_refused_by_name(text: bytes) -> None:
    with pytest.raises(LoadError, match="not JSON") as caught:
        members({"models/m.json": text}).document("models/m.json")
    assert caught.value.where == "models/m.json"


def test_a_damaged_member_is_refused_when_it_is_read() -> None:
    data = bytearray(zipped({"a": b"0123456789"}))
    data[data.index(b"0123456789")] ^= 1
    found = Members(open_archive(io.BytesIO(bytes(data))), len(data))
    with pytest.raises(LoadError, match="damaged") as caught:
        found.bytes("a")
    assert caught.value.where == "a"


def test_encrypted_members_are_refused() -> None:
    data = bytearray(zipped({"a": b"x"}))
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(LoadError, match="encrypted"):
        check_entries(open_archive(io.BytesIO(bytes(data))), len(data))


def test_names_of_an_exported_program_are_plain() -> None:
    check_plain(["models/my-model.v2.json", "data/weights/weight_12", "data/constants/tensor_0", "extra/notes/a b.txt"])
    for name in ("models/a/b.json", "data/weights/weight_x", "models/model.json.exe", "version"):
        with pytest.raises(LoadError) as caught:
            check_plain([name])
        assert caught.value.where == name


def test_one_program_is_named_and_none_or_several_are_counted() -> None:
    assert model_name(["byteorder", "models/net.json"]) == "net"
    with pytest.raises(LoadError, match="0 programs"):
        model_name(["byteorder"])
    with pytest.raises(LoadError, match=r"2 programs \(a, b\)"):
        model_name(["models/b.json", "models/a.json"])


def test_the_other_byte_order_is_refused() -> None:
    other = b"big" if sys.byteorder == "little" else b"little"
    check_byte_order(members({"a": b""}))
    check_byte_order(members({"byteorder": sys.byteorder.encode()}))
    with pytest.raises(LoadError, match="byte order"):
        check_byte_order(members({"byteorder": other}))


def test_errors_inside_a_place_name_it_and_cannot_rewrite_a_terminal() -> None:
    with pytest.raises(LoadError) as caught, inside("model.pt2"):
        raise LoadError("\x1b[2J", where="a\rb", advice="c\x07")
    assert not any(mark in str(caught.value) for mark in "\x1b\r\x07")
    assert str(caught.value.where).startswith("model.pt2: a")
    with pytest.raises(LoadError) as again, inside("model.pt2"), inside("model.pt2"):
        raise LoadError("x")
    assert again.value.where == "model.pt2"
