"""Report of the passes that fit weights: site by site, with the numbers that decided."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from quantc.ir.judgment import Judgment
from quantc.ir.program import LogEntry

HEAD = ("site", "pass", "fate", "before, dB", "after, dB", "why")


@dataclass(frozen=True)
class RecoveryReport:
    """The judgments of each pass, in the order in which they ran. Errors are those of a layer's output relative to its mean
    square, on the batches that nothing was fitted to; in text they are decibels."""

    passes: tuple[tuple[str, tuple[Judgment, ...]], ...]

    @staticmethod
    def of(log: Iterable[LogEntry]) -> RecoveryReport:
        """The report of a program's log."""
        return RecoveryReport(tuple((entry.name, entry.judgments) for entry in log if entry.judgments))

    @property
    def headline(self) -> str:
        """Number of sites that each pass kept, undid and refused."""
        return "; ".join(f"{name}: {_counts(judgments)}" for name, judgments in self.passes) or "nothing was fitted"

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of a table under `HEAD`."""
        return [
            (each.site, name, each.fate, _decibels(each.before), _decibels(each.after), each.reason)
            for name, judgments in self.passes
            for each in judgments
        ]

    def to_data(self) -> list[dict[str, Any]]:
        return [
            {"pass": name, "sites": [{**asdict(each), "gain_dB": _finite(each.gain)} for each in judgments]}
            for name, judgments in self.passes
        ]

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [self.headline]
        for name, judgments in self.passes:
            lines += ["", f"{name}:", *(f"  {each}" for each in judgments)]
        return "\n".join(lines)


def _counts(judgments: tuple[Judgment, ...]) -> str:
    counted = Counter(each.fate for each in judgments)
    gains = [gain for each in judgments if each.fate == "kept" and (gain := _finite(each.gain)) is not None]
    mean = f", {sum(gains) / len(gains):+.1f} dB on average" if gains else ""
    return ", ".join(f"{counted[fate]} {fate}" for fate in ("kept", "undone", "refused") if counted[fate]) + mean


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _decibels(error: float | None) -> str:
    if error is None:
        return ""
    return f"{-10 * math.log10(error):.2f}" if error > 0 else "inf"
