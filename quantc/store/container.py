"""The container of a saved program: a safetensors file in which every byte is accounted for.

Its metadata has one field, `quantc`: JSON with the format, its version, and digests.

    {"digests": {"document": "5f…", "constants/c.weight": "09…"}, "format": "quantc.program", "header": "c4…", "version": 2}

`digests` has one for each tensor. `header` is that of the safetensors header, with itself written as zeros. The digests
show damage; they do not prove who wrote a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantc.errors import LoadError, SaveError
from quantc.frozen import faults_of
from quantc.whole_file import whole_file

FORMAT = "quantc.program"
VERSION = 2
LOWERED = 3
READ = (1, VERSION, LOWERED)
"""The versions that are read. Since 2, contents are stored once and numbers of any kind are stored narrow or packed.
3 is that of lowered modules: a quantc that does not know them must not take one for a program."""
FIELD = "quantc"
ADVICE = "give a file that program.save wrote, or write it again"
DIGEST_SIZE = 16
UNSEALED = "0" * (2 * DIGEST_SIZE)
LENGTH = 8
"""A safetensors file begins with the length of its header, in so many bytes."""
DAMAGED = (OSError, SafetensorError, ValueError, TypeError, RuntimeError, LookupError, AttributeError, OverflowError)
"""What the reader of safetensors raises on files that are not well formed."""

Hex = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * DIGEST_SIZE}}}$")]


class _Kind(BaseModel):
    """The part of a label that every version has."""

    format: str
    version: int


class _Label(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["quantc.program"]
    version: Literal[1, 2, 3]
    header: Hex
    digests: dict[str, Hex]


def digest(tensor: Tensor) -> str:
    """The digest of a contiguous tensor's bytes."""
    # empty ones have strides of all kinds, and no bytes
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return blake2b(data, digest_size=DIGEST_SIZE).hexdigest()


def write(
    path: Path, tensors: Mapping[str, Tensor], known: Mapping[str, str] | None = None, version: int = VERSION
) -> None:
    """Write contiguous tensors that share no memory to a file, whole or not at all. `known` are digests already made."""
    fields = metadata(tensors, known or {}, version)
    try:
        with whole_file(path) as draft:
            save_file(dict(tensors), draft, metadata=fields)
            _seal(draft)
    except SafetensorError as error:
        raise SaveError(
            f"{path} cannot be written: {error}",
            where=str(path),
            advice="give a path in a folder that exists and can be written to",
        ) from error


def metadata(tensors: Mapping[str, Tensor], known: Mapping[str, str], version: int = VERSION) -> dict[str, str]:
    """The metadata of a file with these tensors, not yet sealed."""
    digests = {name: known[name] if name in known else digest(tensor) for name, tensor in tensors.items()}
    label = {"format": FORMAT, "version": version, "header": UNSEALED, "digests": digests}
    return {FIELD: json.dumps(label, sort_keys=True)}


def _seal(draft: Path) -> None:
    """Put the header's digest into the header."""
    header = _header(draft)
    sealed = _digest_of(header)
    with open(draft, "r+b") as file:
        file.seek(LENGTH + header.index(_marked(UNSEALED)))
        file.write(_marked(sealed))


def _marked(seal: str) -> bytes:
    """How a header's digest stands in the header: JSON inside a JSON string."""
    return f'\\"header\\": \\"{seal}\\"'.encode()


def _digest_of(unsealed: bytes) -> str:
    return blake2b(unsealed, digest_size=DIGEST_SIZE).hexdigest()


def _header(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(LENGTH), "little"))


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in memory of their own, each checked. LoadError, naming the field, on any damage."""
    if not path.is_file():
        raise LoadError(f"there is no file {path}", advice=ADVICE)
    try:
        with safe_open(path, framework="pt") as file:
            fields = file.metadata() or {}
            # copies: what is mapped from a file changes when the file does
            tensors: dict[str, Tensor] = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        header = _header(path)
    except DAMAGED as error:
        advice = "read a .pt2 file with qc.capture" if path.suffix == ".pt2" else ADVICE
        raise LoadError(f"it is not a safetensors file, or damaged: {error}", advice=advice) from error
    label = _label(fields)
    if header.count(_marked(label.header)) != 1:
        raise LoadError("the field 'header' of its metadata is not where it should be", advice=ADVICE)
    if _digest_of(header.replace(_marked(label.header), _marked(UNSEALED))) != label.header:
        raise LoadError("the header has been changed: its digest is not the one in the field 'header'", advice=ADVICE)
    _check(tensors, label.digests)
    return tensors


def _label(fields: Mapping[str, str]) -> _Label:
    if FIELD not in fields:
        raise LoadError(f"it holds no program: its metadata has no field {FIELD!r}", advice=ADVICE)
    try:
        kind = _Kind.model_validate_json(fields[FIELD])
        if kind.format != FORMAT:
            raise LoadError(f"the field 'format' is {kind.format!r}, not {FORMAT!r}", advice=ADVICE)
        if kind.version not in READ:
            raise LoadError(
                f"the field 'version' is {kind.version}, and this quantc reads {', '.join(map(str, READ))}",
                advice="use the quantc that wrote the file, or save the program again with this one",
            )
        return _Label.model_validate_json(fields[FIELD])
    except ValidationError as error:
        raise LoadError(f"its label does not read: {'; '.join(faults_of(error))}", advice=ADVICE) from error


def _check(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
    """Every tensor has a digest, every digest its tensor, and they agree."""
    for name in sorted(digests.keys() - tensors.keys()):
        raise LoadError(f"the tensor {name!r} is missing", advice=ADVICE)
    for name in sorted(tensors.keys() - digests.keys()):
        raise LoadError(f"there is a tensor {name!r} that belongs to nothing", advice=ADVICE)
    for name, tensor in tensors.items():
        if digest(tensor) != digests[name]:
            raise LoadError(f"the tensor {name!r} has been changed: its digest is another", advice=ADVICE)
