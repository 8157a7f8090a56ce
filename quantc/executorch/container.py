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
SEAL = b"quantc-1"
SEALED = 32 + len(SEAL)
ADVICE = "write it again with qc.lower(program, 'executorch').save(path), and copy it whole"


def sealed(content: bytes) -> bytes:
    """A file's content with its seal."""
    return content + sha256(content).digest() + SEAL


def unsealed(data: bytes, where: str) -> bytes:
    """The content of a file; LoadError if it is no `.pte`, cut short, or not what was sealed."""
    if data[4:8] != MAGIC:
        raise LoadError("this is no .pte file: it does not begin as one", where=where, advice=ADVICE)
    content, seal = data[:-SEALED], data[-SEALED : -len(SEAL)]
    if sha256(content).digest() != seal:  # a seal that fits is one, whatever is left of its mark
        if data.endswith(SEAL):
            raise LoadError("the file is damaged: it is not what was sealed", where=where, advice=ADVICE)
        content = data
    needed = _needed(content)
    if needed is not None and len(content) < needed:
        raise LoadError(f"the file is cut short: {len(content)} bytes of {needed}", where=where, advice=ADVICE)
    return content


def _needed(content: bytes) -> int | None:
    """How long the header says the file is; None without a header."""
    if content[8:12] != HEADER or len(content) < 40:
        return None
    _, program_size, base, size = struct.unpack_from("<IQQQ", content, 12)
    return int(max(program_size, base + size))
