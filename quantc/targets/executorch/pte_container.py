"""`.pte` files: their header, and the seal that quantc puts after what ExecuTorch reads.

ExecuTorch believes the sizes and weights that a file claims. The header says how long the file must be, and the seal, which
is a digest of all before it, that nothing in between was damaged.
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


def sealed(content: bytes) -> bytes:
    """A file's content with its seal."""
    return content + _seal(content)


def unsealed(data: bytes, where: str) -> bytes:
    """The content of a file; LoadError if it is no `.pte`, cut short, longer than it was, or not what was sealed. Files of
    others have no seal."""
    if data[4:8] != MAGIC:
        raise LoadError("this is no .pte file: it does not begin as one", where=where, advice=ADVICE)
    needed = _needed(data)
    if needed is not None and len(data) < needed:
        raise LoadError(f"the file is cut short: {len(data)} bytes of {needed}", where=where, advice=ADVICE)
    end = needed if needed is not None else len(data) - SEALED if data.endswith(SEAL) else len(data)
    content, seal = data[:end], data[end:]
    if seal != _seal(content) and (seal or data.endswith(SEAL)):
        raise LoadError("the file is damaged: it is not what was sealed", where=where, advice=ADVICE)
    return content


def _seal(content: bytes) -> bytes:
    return sha256(content).digest() + SEAL


def _needed(data: bytes) -> int | None:
    """How long the header says the content is; None without a header, and for one of before there were such lengths."""
    if data[8:12] != HEADER or len(data) < 40:
        return None
    length, program_size, base, size = struct.unpack_from("<IQQQ", data, 12)
    return int(max(program_size, base + size)) if length >= HEADER_LENGTH else None
