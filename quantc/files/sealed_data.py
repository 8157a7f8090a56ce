"""Sealed JSON and TOML: limits on depth and size, and a digest against damage.

Files that quantc writes have the entry `seal`, a digest of all other entries. It covers the data, not the text: spaces,
comments and the order of keys may change. Files written by hand have no seal and are not checked; to edit a sealed one,
remove the entry.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from quantc.errors import LoadError, QuantcError

SEAL = "seal"
DIGEST_SIZE = 16
MAX_DEPTH = 64
"""Maximum nesting of lists and tables, and maximum number of parts of a TOML key."""
MAX_BYTES = 8 << 20
"""The longest text that is parsed."""
EDITED = f"if you edited it by hand, remove its line {SEAL!r}; otherwise write it again"

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_TOML_QUIET = re.compile(
    r"""\"\"\"(?:[^\\]|\\.)*?(?:\"\"\"|\\?\Z)|\'\'\'.*?(?:\'\'\'|\Z)|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|\#[^\n]*+""",
    re.DOTALL,
)
"""Strings and comments of TOML, in which brackets and dots mean nothing. An unterminated one extends to the end of the
text: the parser stops there."""
_BETWEEN_KEYS = re.compile(r"[=,\[\]{}\n]")
_BRACKETS = re.compile(r"[\[\]{}]")


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with its seal as the first entry."""
    return {SEAL: _digest(data), **data}


def unseal(data: Mapping[str, Any], error: type[QuantcError] = LoadError, *, needed: bool = False) -> dict[str, Any]:
    """The data without its seal; raise `error` if the digest differs, or if `needed` and there is no seal."""
    rest = {name: value for name, value in data.items() if name != SEAL}
    if SEAL not in data:
        if needed:
            raise error("it has no seal: it was written by an earlier quantc, or by hand", advice="write it again")
        return rest
    if data[SEAL] != _digest(rest):
        raise error("its seal is not that of its content: it was changed since it was written", advice=EDITED)
    return rest


def _digest(data: Mapping[str, Any]) -> str:
    """Digest of plain data: of its JSON text with sorted keys."""
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError):  # such as a date in TOML: cannot have been sealed
        return ""
    return blake2b(text.encode(), digest_size=DIGEST_SIZE).hexdigest()


def parse_json(text: str, *, most: int = MAX_BYTES, depth: int = MAX_DEPTH) -> Any:
    """Parse JSON. Raise LoadError if it is malformed, too long, or nested too deep."""
    _check_size(text, most)
    _check_depth(_JSON_STRING.sub('""', text), depth)
    try:
        return json.loads(text)
    except ValueError as error:
        raise LoadError(f"it is not JSON: {error}", advice="write it again") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raise LoadError if it is malformed, too long, or nested too deep."""
    _check_size(text, MAX_BYTES)
    bare = _TOML_QUIET.sub('""', text)
    _check_depth(bare, MAX_DEPTH)
    dots = max((piece.count(".") for piece in _BETWEEN_KEYS.split(bare)), default=0)
    if dots >= MAX_DEPTH:
        raise LoadError(f"a key has {dots + 1} parts, and {MAX_DEPTH} are the most", advice="write shorter keys")
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise LoadError(f"it is not TOML: {error}", advice="write it again") from error


def _check_size(text: str, most: int) -> None:
    if len(text) > most:
        raise LoadError(f"it is {len(text):,} characters long, and {most:,} are the most", advice="make it shorter")


def _check_depth(bare: str, most: int) -> None:
    """Raise LoadError on brackets nested beyond a depth, before a parser recurses into them."""
    depth = 0
    for found in _BRACKETS.finditer(bare):
        depth += 1 if found[0] in "[{" else -1
        if depth > most:
            raise LoadError(f"it is nested deeper than {most}", advice="write it flatter")
