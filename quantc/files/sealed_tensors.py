"""Sealed tensor files: safetensors in which a digest covers every byte. The format of programs, statistics and dumps.

Its metadata has one field, `quantc`: JSON with the kind of file, its version, and digests.

    {"digests": {"document": "5f…", "constants/c.weight": "09…"}, "format": "quantc.program", "header": "c4…", "version": 2}

`digests` has an entry for each tensor. `header` is the digest of the safetensors header, computed with its own digits
as zeros. The digests show damage; they do not prove who wrote a file.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, BinaryIO

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from torch import Tensor

from quantc.errors import LoadError, SaveError
from quantc.files.atomic_file import whole_file
from quantc.files.regular_file import check_regular
from quantc.support.validated import faults_of

FIELD = "quantc"
DIGEST_SIZE = 16
UNSEALED = "0" * (2 * DIGEST_SIZE)
LENGTH = 8
"""Size in bytes of the header length with which a safetensors file begins."""
DAMAGED = (OSError, SafetensorError, ValueError, TypeError, RuntimeError, LookupError, AttributeError, OverflowError)
"""Exceptions that the safetensors reader raises on malformed files."""
ATTEMPTS = 100
"""Maximum number of reads of a file that is replaced while it is read."""
DTYPES: dict[torch.dtype, str] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtype names in a safetensors header, in the order in which tensors lie in the file."""

Piece = bytes | memoryview
Hex = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * DIGEST_SIZE}}}$")]


@dataclass(frozen=True)
class FileKind:
    """A kind of file, identified by its label."""

    format: str
    """The `format` in its label: `quantc.program`."""
    versions: tuple[int, ...]
    """Versions that can be read."""
    holds: str
    """Noun for its contents, for messages: "program"."""
    advice: str
    unsealed: frozenset[int] = frozenset()
    """Versions from before files were sealed: damage cannot be detected in them."""


class _Known(BaseModel):
    """The part of a label that every version has."""

    format: str
    version: int


class _Label(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: str
    version: int
    header: Hex
    digests: dict[str, Hex]


def digest(tensor: Tensor) -> str:
    """The digest of a contiguous tensor's bytes."""
    return blake2b(_bytes(tensor), digest_size=DIGEST_SIZE).hexdigest()


def _bytes(tensor: Tensor) -> Piece:
    # empty tensors have arbitrary strides, and no bytes
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


# -- writing ---------------------------------------------------------------------------------------------------


def write(
    path: Path, kind: FileKind, tensors: Mapping[str, Tensor], version: int, known: Mapping[str, str] | None = None
) -> None:
    """Write contiguous tensors to a file atomically. `known` are digests already computed."""
    parts = _parts(kind, tensors, version, known or {})
    with whole_file(path) as draft, open(draft, "wb") as file:
        _put(file, parts)


def to_bytes(kind: FileKind, tensors: Mapping[str, Tensor], version: int) -> bytes:
    """The bytes of a file with these tensors."""
    stream = io.BytesIO()
    _put(stream, _parts(kind, tensors, version, {}))
    return stream.getvalue()


def _put(file: BinaryIO, parts: Iterator[Piece]) -> None:
    for part in parts:
        file.write(part)


def _parts(kind: FileKind, tensors: Mapping[str, Tensor], version: int, known: Mapping[str, str]) -> Iterator[Piece]:
    """The bytes of a file, chunk by chunk."""
    rows = _in_order(tensors)
    header = _header(rows, metadata(kind, tensors, version, known))
    sealed = header.replace(_marked(UNSEALED), _marked(_digest_of(header)))
    return iter([len(sealed).to_bytes(LENGTH, "little"), sealed, *(_bytes(tensor) for tensor in rows.values())])


def metadata(kind: FileKind, tensors: Mapping[str, Tensor], version: int, known: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file with these tensors, not yet sealed."""
    digests = {name: known[name] if name in known else digest(tensor) for name, tensor in tensors.items()}
    label = {"format": kind.format, "version": version, "header": UNSEALED, "digests": digests}
    return {FIELD: json.dumps(label, sort_keys=True)}


def file_size(kind: FileKind, tensors: Mapping[str, Tensor], version: int, known: Mapping[str, str]) -> int:
    """The size in bytes of a file with these tensors."""
    header = _header(_in_order(tensors), metadata(kind, tensors, version, known))
    return LENGTH + len(header) + sum(tensor.nbytes for tensor in tensors.values())


def _in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in file order: the widest dtype first, so that all are aligned."""
    places = {dtype: place for place, dtype in enumerate(DTYPES)}
    for name, tensor in tensors.items():
        if tensor.dtype not in places:
            raise SaveError(
                f"the tensor {name!r} is {tensor.dtype}, which safetensors files do not hold",
                where=name,
                advice="convert it to another type first",
            )
    return dict(sorted(tensors.items(), key=lambda row: (places[row[1].dtype], row[0])))


def _header(rows: Mapping[str, Tensor], fields: Mapping[str, str]) -> bytes:
    """A safetensors header: JSON without spaces, padded to a multiple of 8 bytes."""
    ends = pairwise(accumulate((tensor.nbytes for tensor in rows.values()), initial=0))
    entries = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": end}
        for (name, tensor), end in zip(rows.items(), ends, strict=True)
    }
    text = json.dumps({"__metadata__": dict(fields), **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % LENGTH)


def _marked(seal: str) -> bytes:
    """The bytes of a header's digest inside the header: JSON inside a JSON string."""
    return f'\\"header\\": \\"{seal}\\"'.encode()


def _digest_of(unsealed: bytes) -> str:
    return blake2b(unsealed, digest_size=DIGEST_SIZE).hexdigest()


# -- reading ---------------------------------------------------------------------------------------------------


def read(path: Path, kind: FileKind) -> dict[str, Tensor]:
    """Read and check the tensors of a file, into memory of their own. Raise LoadError, naming the field, on any
    damage."""
    check_regular(path, kind.advice)
    try:
        for _ in range(ATTEMPTS):
            if (found := _content(path)) is not None:
                break
        else:
            raise LoadError("others replace it again and again while it is read", advice="read it when they are done")
    except DAMAGED as error:
        raise _no_tensors(kind, error, path) from error
    fields, header, tensors = found
    _check(kind, fields, header, tensors)
    return tensors


def _content(path: Path) -> tuple[Mapping[str, str], bytes, dict[str, Tensor]] | None:
    """The metadata, the header and the tensors of a file; None if the file was replaced meanwhile."""
    with open(path, "rb") as stream:

        def is_replaced() -> bool:
            return not os.path.samestat(os.fstat(stream.fileno()), os.stat(path))

        try:
            with safe_open(path, framework="pt") as file:  # opens it more than once
                fields = file.metadata() or {}
                # copies: a memory map changes with its file
                tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except DAMAGED:
            if is_replaced():
                return None
            raise
        # safe_open has validated the length
        header = stream.read(int.from_bytes(stream.read(LENGTH), "little"))
        return None if is_replaced() else (fields, header, tensors)


def from_bytes(content: bytes, kind: FileKind) -> dict[str, Tensor]:
    """The tensors in the result of `to_bytes`, checked. Raise LoadError, naming the field, on any damage."""
    header = content[LENGTH : LENGTH + int.from_bytes(content[:LENGTH], "little")]
    try:
        tensors: dict[str, Tensor] = load_tensors(content)  # raises on an invalid header
        fields = json.loads(header).get("__metadata__", {})
    except DAMAGED as error:
        raise _no_tensors(kind, error, None) from error
    _check(kind, fields, header, tensors)
    return tensors


def label_of(path: Path) -> str | None:
    """The kind of file by its label, intact or damaged; None without a label."""
    try:
        with safe_open(check_regular(path, "give a file"), framework="pt") as file:
            fields = file.metadata() or {}
        return _Known.model_validate_json(fields.get(FIELD, "")).format
    except (LoadError, *DAMAGED):
        return None


def _no_tensors(kind: FileKind, error: Exception, path: Path | None) -> LoadError:
    advice = "read a .pt2 file with qc.capture" if path is not None and path.suffix == ".pt2" else kind.advice
    return LoadError(f"it is not a safetensors file, or damaged: {error}", advice=advice)


def _check(kind: FileKind, fields: Mapping[str, str], header: bytes, tensors: Mapping[str, Tensor]) -> None:
    label = _label(kind, fields)
    if header.count(_marked(label.header)) != 1:
        raise LoadError("the field 'header' of its metadata is not where it should be", advice=kind.advice)
    if _digest_of(header.replace(_marked(label.header), _marked(UNSEALED))) != label.header:
        raise LoadError(
            "the header has been changed: its digest is not the one in the field 'header'", advice=kind.advice
        )
    _check_digests(kind, tensors, label.digests)


def _label(kind: FileKind, fields: Mapping[str, str]) -> _Label:
    if FIELD not in fields:
        raise LoadError(f"it holds no {kind.holds}: its metadata has no field {FIELD!r}", advice=kind.advice)
    try:
        known = _Known.model_validate_json(fields[FIELD])
        if known.format != kind.format:
            raise LoadError(f"the field 'format' is {known.format!r}, not {kind.format!r}", advice=kind.advice)
        if known.version in kind.unsealed:
            raise LoadError(
                "it was written by an earlier quantc, without digests: whether it is damaged cannot be told",
                advice=kind.advice,
            )
        if known.version not in kind.versions:
            raise LoadError(
                f"the field 'version' is {known.version}, and this quantc reads {', '.join(map(str, kind.versions))}",
                advice=f"use the quantc that wrote the file, or save the {kind.holds} again with this one",
            )
        return _Label.model_validate_json(fields[FIELD])
    except ValidationError as error:
        raise LoadError(f"its label does not read: {'; '.join(faults_of(error))}", advice=kind.advice) from error


def _check_digests(kind: FileKind, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
    """Check that tensors and digests correspond one to one, and agree."""
    for name in sorted(digests.keys() - tensors.keys()):
        raise LoadError(f"the tensor {name!r} is missing", advice=kind.advice)
    for name in sorted(tensors.keys() - digests.keys()):
        raise LoadError(f"there is a tensor {name!r} that belongs to nothing", advice=kind.advice)
    for name, tensor in tensors.items():
        if digest(tensor) != digests[name]:
            raise LoadError(f"the tensor {name!r} has been changed: its digest is another", advice=kind.advice)
