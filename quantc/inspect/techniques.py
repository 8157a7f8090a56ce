"""How the techniques of ops are counted and shown. Where all is static there is nothing to tell apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quantc.spec.formats import Timing

HEAD = "technique"
"""The head of the column that tells them."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def counted(techniques: Iterable[str]) -> dict[str, int]:
    """How many there are of each; ops without one are not counted."""
    found = Counter(techniques)
    return {timing.value: found[timing.value] for timing in Timing}


def are_mixed(techniques: Iterable[str]) -> bool:
    """Whether something is not static."""
    return any(technique not in ("", Timing.STATIC) for technique in techniques)


def in_words(techniques: Iterable[str]) -> str:
    """The techniques with their counts, "4 static, 6 dynamic"; empty where all is static."""
    given = list(techniques)
    if not are_mixed(given):
        return ""
    return ", ".join(f"{count} {technique}" for technique, count in counted(given).items() if count)


def with_techniques(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table as it is, or without its column of techniques where that tells nothing."""
    at = list(head).index(HEAD)
    if any(row[at] not in ("", Timing.STATIC) for row in rows):
        return tuple(head), [tuple(row) for row in rows]
    return _without(head, at), [_without(row, at) for row in rows]


def _without(cells: Sequence[str], at: int) -> tuple[str, ...]:
    return (*cells[:at], *cells[at + 1 :])
