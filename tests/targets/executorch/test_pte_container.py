"""The seal of a `.pte`: behind what ExecuTorch reads, a digest of all before it."""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest

from quantc.errors import LoadError
from quantc.targets.executorch.pte_container import HEADER, MAGIC, SEAL, SEALED, seal_pte, unseal_pte

SIZE = 40 + 256 * 8


def with_header(size: int = SIZE, *, base: int = 0, segment: int = 0, header: int = 32) -> bytes:
    """A file whose header says how long its program is, and where its last segment begins and how long that is."""
    start = b"\x10\0\0\0" + MAGIC + HEADER + struct.pack("<IQQQ", header, size, base, segment)
    return start + bytes(range(256)) * 8


def test_a_seal_is_a_digest_behind_the_content() -> None:
    content = with_header()
    made = seal_pte(content)
    assert made == content + sha256(content).digest() + SEAL
    assert len(made) == len(content) + SEALED
    assert unseal_pte(made, "model.pte") == content


def test_every_length_but_its_own_is_refused() -> None:
    content = with_header()
    whole = seal_pte(content)
    assert len(content) == SIZE
    assert unseal_pte(content, "model.pte") == content, "as others write them; that quantc does not, `qc.load` looks at"
    others = [whole[:-count] for count in range(1, SEALED)]
    others += [whole + bytes(count) for count in (1, 7, 40, 4096)] + [whole + whole[-40:], content + b"x", whole[:-8]]
    others += [
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(len(whole) - 40, len(whole))
    ]
    for other in others:
        with pytest.raises(LoadError):
            unseal_pte(other, "model.pte")


def test_the_end_is_that_of_the_program_or_of_its_last_segment() -> None:
    for content in (with_header(100, base=128, segment=SIZE - 128), with_header(SIZE, base=64, segment=64)):
        assert unseal_pte(seal_pte(content), "model.pte") == content
    with pytest.raises(LoadError, match=f"cut short: {SIZE} bytes of {SIZE + 1}") as caught:
        unseal_pte(with_header(SIZE, base=SIZE, segment=1), "model.pte")
    assert caught.value.where == "model.pte"


def test_files_without_lengths_are_as_long_as_they_are() -> None:
    for content in (b"\x10\0\0\0ET12" + bytes(100), b"\x10\0\0\0ET12", with_header(header=24)):
        assert unseal_pte(content, "model.pte") == content
        assert unseal_pte(seal_pte(content), "model.pte") == content
        with pytest.raises(LoadError, match="damaged"):
            unseal_pte(seal_pte(content)[:-SEALED] + b"x" + seal_pte(content)[-SEALED:], "model.pte")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"ET12" + bytes(60), bytes(64)])
def test_what_does_not_begin_as_one_is_refused(data: bytes) -> None:
    with pytest.raises(LoadError, match=r"\.pte"):
        unseal_pte(data, "model.pte")
