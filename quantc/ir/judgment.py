"""Judgments of passes that fit weights: what became of each site, and the numbers that decided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Fate = Literal["kept", "undone", "refused"]


@dataclass(frozen=True, slots=True)
class Judgment:
    """The fate of one site in one pass."""

    site: str
    fate: Fate
    before: float | None = None
    """Mean squared error of the layer's output that rounding its weights makes, relative to the output's mean square, on
    the half of the batches that nothing was fitted to."""
    after: float | None = None
    reason: str = ""

    @property
    def gain(self) -> float | None:
        """The gain in decibels; infinite where no error is left."""
        if self.before is None or self.after is None:
            return None
        if self.after <= 0:
            return math.inf if self.before > 0 else 0.0
        return 10 * math.log10(self.before / self.after) if self.before > 0 else -math.inf

    def __str__(self) -> str:
        numbers = ""
        if self.before is not None and self.after is not None:
            numbers = f" {_decibels(self.before)} -> {_decibels(self.after)}"
        return f"{self.site}: {self.fate}{numbers}{f' ({self.reason})' if self.reason else ''}"


def _decibels(error: float) -> str:
    """The signal-to-noise ratio of a relative error."""
    return f"{-10 * math.log10(error):.2f} dB" if error > 0 else "exact"
