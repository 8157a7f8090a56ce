"""The seal of an `.onnx` file: its last metadata entry, `quantc.seal`, is a digest of everything before it.

Protobuf messages can be extended: appended bytes are read as more fields. A model too large for one file stores its
weights in another, whose digest is the entry `quantc.data`, just before the seal.
"""

from __future__ import annotations

from hashlib import file_digest, sha256
from pathlib import Path

from quantc.errors import LoadError

DIGITS = 64


def _begin(key: bytes) -> bytes:
    """One more of a model's `metadata_props`, its field 14, up to the value, which has `DIGITS` digits."""
    entry = b"\x0a" + bytes([len(key)]) + key + b"\x12" + bytes([DIGITS])
    return b"\x72" + bytes([len(entry) + DIGITS]) + entry


SEAL, DATA = _begin(b"quantc.seal"), _begin(b"quantc.data")


def seal_model(content: bytes, data: Path | None = None) -> bytes:
    """A model's bytes with their seal, and the digest of its weight file."""
    if data is not None:
        content += DATA + _digest_of(data)
    return content + SEAL + sha256(content).hexdigest().encode()


def data_file(path: Path) -> Path:
    """Path of a model's separate weight file."""
    return path.with_name(f"{path.name}.data")


def check_seal(path: Path) -> None:
    """Raise LoadError if a file differs from its sealed content. A file without a seal was not written by quantc and is not checked."""
    with path.open("rb") as file:
        content, seal = _split_entry(file.read(), SEAL)
    if seal is None:
        return
    if sha256(content).hexdigest().encode() != seal:
        raise _damage_error(path)
    _, data = _split_entry(content, DATA)
    if data is not None and (not data_file(path).is_file() or _digest_of(data_file(path)) != data):
        raise _damage_error(data_file(path))


def _split_entry(content: bytes, begin: bytes) -> tuple[bytes, bytes | None]:
    """Content before a trailing entry, and the entry's value; None if it is missing."""
    length = len(begin) + DIGITS
    return (content[:-length], content[-DIGITS:]) if content[-length:-DIGITS] == begin else (content, None)


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest().encode()


def _damage_error(path: Path) -> LoadError:
    return LoadError(
        "the file is damaged: it is not what was sealed",
        where=str(path),
        advice="write it again with qc.lower(program, 'onnx').save(path), and copy it whole",
    )
