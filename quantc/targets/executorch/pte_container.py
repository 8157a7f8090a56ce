"""`.pte` files: their header, and the seal that quantc appends after ExecuTorch's content.

ExecuTorch trusts the sizes and weights in a file. The header gives the required length, and the seal, a digest of
everything before it, proves that nothing was damaged.
"""

from __future__ import annotations

import struct
from hashlib import sha256

from quantc.errors import LoadError

MAGIC = b"ET12"
HEADER = b"eh00"
HEADER_LENGTH = 32
"""Of a header that says where the last segment ends."""
SEAL = b"quantc-1"
SEALED = 32 + len(SEAL)
ADVICE = "write it again with qc.lower(program, 'executorch').save(path), and copy it whole"


def seal_pte(content: bytes) -> bytes:
    """A file's content with its seal."""
    return content + _seal(content)


def unseal_pte(data: bytes, where: str) -> bytes:
    """Content of a file; LoadError if it is not a `.pte`, truncated, extended, or differs from what was sealed. Files
    of other writers have no seal.
    """
    if data[4:8] != MAGIC:
        raise LoadError("invalid .pte file: it does not begin as one", where=where, advice=ADVICE)
    needed = _content_length(data)
    if needed is not None and len(data) < needed:
        raise LoadError(f"the file is cut short: {len(data)} bytes of {needed}", where=where, advice=ADVICE)
    end = needed if needed is not None else len(data) - SEALED if data.endswith(SEAL) else len(data)
    content, seal = data[:end], data[end:]
    if seal != _seal(content) and (seal or data.endswith(SEAL)):
        raise LoadError("the file is damaged: it is not what was sealed", where=where, advice=ADVICE)
    return content


def _seal(content: bytes) -> bytes:
    return sha256(content).digest() + SEAL


def _content_length(data: bytes) -> int | None:
    """Content length according to the header; None without a header, or with one from before it had lengths."""
    if data[8:12] != HEADER or len(data) < 40:
        return None
    length, program_size, base, size = struct.unpack_from("<IQQQ", data, 12)
    return int(max(program_size, base + size)) if length >= HEADER_LENGTH else None
