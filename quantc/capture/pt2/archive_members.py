"""Members of a `.pt2` archive: allowed names, size limits, and their bytes, each read once.

torch stores members uncompressed. So nothing may be compressed, and all members together may not be larger than the
file: no archive can expand to more than is on disk.
"""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import torch

from quantc.errors import LoadError

MODEL = re.compile(r"models/([A-Za-z0-9_.-]+)\.json")
PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(?:version|serialization_id)|\.format_version|\.storage_alignment"
    r"|models/[A-Za-z0-9_.-]+\.json|data/weights/(?:weight_[0-9]+|[A-Za-z0-9_.-]+_weights_config\.json)"
    r"|data/constants/(?:tensor_[0-9]+|[A-Za-z0-9_.-]+_constants_config\.json)"
    r"|data/sample_inputs/[A-Za-z0-9_.-]+\.pt|extra/[^\\]*"
)
LARGEST_DOCUMENT = 1 << 30
ENCRYPTED = 0x1
REGENERATE = "write the file again with torch.export.save, and copy it in binary mode"
# Members that other tools put into archives of this kind, and what they mean.
FOREIGN = {
    "data/aotinductor/": "code compiled by AOTInductor, which would run when loaded",
    "data/executorch/": "an ExecuTorch program",
    "data/mtia": "a program compiled for an accelerator",
    "xl_model_weights/": "weights of a compiled program",
    "data/constants/custom_obj_": "an object of a custom class",
    "data/constants/opaque_obj_": "a pickled Python object, which would run code when loaded",
    "data/weights/": "weights in the pickled form of older versions of torch",
    "data/constants/": "constants in the pickled form of older versions of torch",
}


@contextmanager
def inside(place: str) -> Iterator[None]:
    """Context manager that prefixes a place to `where` of a LoadError raised inside, and makes its text safe for a terminal."""
    try:
        yield
    except LoadError as error:
        where = f"{place}: {_printable(error.where)}" if error.where and error.where != place else place
        advice = _printable(error.advice) if error.advice else None
        raise LoadError(_printable(error.what), where=where, advice=advice) from error.__cause__


def _printable(text: str) -> str:
    """Text quoted from a file, without the control characters by which it could rewrite a terminal."""
    return "".join(mark if mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in text)


class Members:
    """A checked archive over an open file. Bytes are read once; nothing is read a second time."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive = archive
        self._entries = check_entries(archive, size)

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def size(self, name: str) -> int:
        return self._entry(name).file_size

    def bytes(self, name: str) -> bytes:
        buffer = self.tensor(name).numpy()
        return buffer.tobytes()

    def tensor(self, name: str) -> torch.Tensor:
        """Raw bytes of a member, in memory that torch owns."""
        entry = self._entry(name)
        raw = torch.empty(entry.file_size, dtype=torch.uint8)
        view = raw.numpy().data
        filled = 0
        try:
            with self._archive.open(entry) as stream:
                while chunk := stream.read(1 << 24):
                    view[filled : filled + len(chunk)] = chunk
                    filled += len(chunk)
        except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
            raise LoadError(f"the archive is damaged: {error}", where=name, advice=REGENERATE) from error
        if filled != entry.file_size:
            raise LoadError("the archive is cut short", where=name, advice=REGENERATE)
        return raw

    def document(self, name: str) -> object:
        """A JSON member, parsed."""
        if self.size(name) > LARGEST_DOCUMENT:
            raise LoadError(f"a document of {self.size(name)} bytes is too large to read", where=name)
        try:
            return json.loads(self.bytes(name).decode())
        except (ValueError, RecursionError) as error:
            raise LoadError(f"the archive is damaged: not JSON ({error})", where=name, advice=REGENERATE) from error

    def _entry(self, name: str) -> zipfile.ZipInfo:
        if name not in self._entries:
            raise LoadError("the archive is incomplete: a member is missing", where=name, advice=REGENERATE)
        return self._entries[name]


def check_entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Entries of an archive by name, without their common folder; LoadError if any is malformed."""
    entries: dict[str, zipfile.ZipInfo] = {}
    roots = set()
    for entry in archive.infolist():
        _check_entry(entry)
        root, _, name = entry.filename.partition("/")
        roots.add(root)
        if name in entries:
            raise LoadError("the archive holds the same member twice", where=entry.filename[:80], advice=REGENERATE)
        entries[name] = entry
    if len(roots) > 1:
        raise LoadError(f"the archive mixes several folders: {', '.join(sorted(roots))[:80]}", advice=REGENERATE)
    total = sum(entry.file_size for entry in entries.values())
    if total > size:
        raise LoadError(f"the archive claims to hold {total} bytes but is only {size} bytes long", advice=REGENERATE)
    return entries


def _check_entry(entry: zipfile.ZipInfo) -> None:
    where = entry.filename[:80]
    # The zip reader cuts names at a zero byte and turns separators; other readers might not.
    if entry.orig_filename != entry.filename or not entry.filename.isprintable() or "\\" in entry.filename:
        raise LoadError("the archive has a member with an odd name", where=repr(where), advice=REGENERATE)
    parts = entry.filename.split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
        raise LoadError("the archive has a member outside its folder", where=where, advice=REGENERATE)
    if entry.flag_bits & ENCRYPTED:
        raise LoadError("the archive is encrypted", where=where, advice=REGENERATE)
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise LoadError(
            "the archive has a compressed member; torch stores them as they are", where=where, advice=REGENERATE
        )


def check_plain(names: Iterable[str]) -> None:
    """LoadError if an archive holds anything other than an exported program and text."""
    for name in names:
        if PLAIN.fullmatch(name):
            continue
        meaning = next((text for start, text in FOREIGN.items() if name.startswith(start)), "an unknown kind of file")
        raise LoadError(
            f"the archive holds {meaning}",
            where=name[:80],
            advice="save the exported program alone: torch.export.save(torch.export.export(model, inputs), path)",
        )


def model_name(names: Iterable[str]) -> str:
    """Name of the one program in an archive."""
    found = [match[1] for name in names if (match := MODEL.fullmatch(name))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(sorted(found)) or "none"
    raise LoadError(
        f"the archive holds {len(found)} programs ({listed}), not one",
        advice="save each program to a file of its own with torch.export.save",
    )


def check_byte_order(members: Members) -> None:
    if "byteorder" in members.names and members.bytes("byteorder") != sys.byteorder.encode():
        raise LoadError("the archive was written on a machine of the other byte order", where="byteorder")


def open_archive(stream: BinaryIO | io.BytesIO) -> zipfile.ZipFile:
    """Zip directory of a stream; LoadError if it cannot be read."""
    try:
        return zipfile.ZipFile(stream)
    except (
        zipfile.BadZipFile,
        OSError,
        EOFError,
        ValueError,
        NotImplementedError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise LoadError(
            f"the zip archive is damaged or cut short: {error}",
            advice="copy or download the file again, in binary mode",
        ) from error
