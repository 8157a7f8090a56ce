"""Counting and display of quantization techniques. Omitted where everything is static."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quantc.spec.formats import Timing

HEAD = "technique"
"""The head of the column that tells them."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def count_techniques(techniques: Iterable[str]) -> dict[str, int]:
    """Number of ops by technique; ops without one are not counted."""
    found = Counter(techniques)
    return {timing.value: found[timing.value] for timing in Timing}


def are_mixed(techniques: Iterable[str]) -> bool:
    """True if something is not static."""
    return any(technique not in ("", Timing.STATIC) for technique in techniques)


def in_words(techniques: Iterable[str]) -> str:
    """Techniques with their counts, "4 static, 6 dynamic"; empty if everything is static."""
    given = list(techniques)
    if not are_mixed(given):
        return ""
    return ", ".join(f"{count} {technique}" for technique, count in count_techniques(given).items() if count)


def with_techniques(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The table, without its technique column where everything is static."""
    at = list(head).index(HEAD)
    if any(row[at] not in ("", Timing.STATIC) for row in rows):
        return tuple(head), [tuple(row) for row in rows]
    return _without(head, at), [_without(row, at) for row in rows]


def _without(cells: Sequence[str], at: int) -> tuple[str, ...]:
    return (*cells[:at], *cells[at + 1 :])
