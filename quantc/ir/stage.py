"""The progress of a program: its stages, and the entries of its log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from quantc.ir.judgment import Judgment


class Stage(IntEnum):
    """The progress of a Program. Passes declare the stage they need and the one they give."""

    CAPTURED = 0
    CANONICAL = 1
    FUSED = 2
    ANNOTATED = 3
    SHARED = 4
    OBSERVED = 5
    CALIBRATED = 6
    QUANTIZED = 7
    FOLDED = 8
    LOWERED = 9
    PLACED = 10

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of `Program.log`: the pass, its duration, whether it changed anything, and its notes."""

    name: str
    seconds: float
    changed: bool
    notes: tuple[str, ...] = ()
    judgments: tuple[Judgment, ...] = ()
    """The fate of each site, where the pass decided by numbers; the notes say the same."""

    def __str__(self) -> str:
        text = f"{self.name}: {'changed' if self.changed else 'no change'}, {self.seconds * 1e3:.1f} ms"
        return "\n".join([text, *(f"  {note}" for note in self.notes)])
