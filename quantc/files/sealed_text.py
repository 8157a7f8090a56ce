"""Sealed text files: the last line is a comment with the digest of all text before it.

    # sealed 5f0c…

To edit the text, remove that line; a text without it counts as written by hand and is not checked.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from quantc.errors import LoadError

DIGEST_SIZE = 16
ADVICE = "if you edited it by hand, remove its last line, '# sealed …'; otherwise write it again"

_SEAL = re.compile(rf"# sealed ([0-9a-f]{{{2 * DIGEST_SIZE}}})\n?\Z")


def sealed_text(text: str) -> str:
    """The text with its seal appended."""
    whole = text if text.endswith("\n") else f"{text}\n"
    return f"{whole}# sealed {_digest(whole)}\n"


def unsealed_text(text: str) -> str:
    """The text without its seal; raise LoadError if the digest differs."""
    found = _SEAL.search(text)  # not anchored to the start of a line: the newline before it may be the damage
    if found is None:
        return text
    rest = text[: found.start()]
    if _digest(rest) != found[1]:
        raise LoadError("its seal is not that of its text: it was changed since it was written", advice=ADVICE)
    return rest


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=DIGEST_SIZE).hexdigest()
