"""Cost tables: kernel times measured beforehand, for kernel selection without tuning.

One JSON file per target, written by `python -m benchmarks.costs`:

    {"processor": "…", "rows": [{"kind": "conv2d 3x3 s1", "size": 3136, "channels": [64, 64],
                                 "microseconds": {"onednn": 1410.0, "fbgemm": 1620.0}}]}

Absolute times are those of one processor. Selection only asks for the fastest family at the nearest shape, which varies
much less between processors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

from quantc.targets.kernels.kernel import Work
from quantc.targets.kernels.saturation import adds_in_16_bits

CHANNELS_WEIGHT = 0.5
"""Weight of a doubling of channels against a doubling of the size, in the distance between shapes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Time of each kernel family at one shape, in microseconds."""

    work: Work
    microseconds: dict[str, float]

    def distance(self, work: Work) -> float:
        """Distance between two shapes, in doublings."""
        apart = abs(math.log2(max(work.size, 1) / max(self.work.size, 1)))
        pairs = zip(work.channels, self.work.channels, strict=True)
        return apart + CHANNELS_WEIGHT * sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


def file_of(target: str) -> str:
    """File name of a target's cost table on this processor. VNNI does in one instruction what takes some families three
    without it, which changes their ranking.
    """
    return f"costs_{target}.json" if adds_in_16_bits() else f"costs_{target}_vnni.json"


@cache
def cost_table(target: str) -> dict[tuple[str, int], tuple[Measured, ...]]:
    """A target's cost table, by kind and number of channels; empty if it has none."""
    folder = resources.files("quantc.targets.kernels")
    names = (file_of(target), f"costs_{target}.json")
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return {}
    found: dict[tuple[str, int], list[Measured]] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        work = Work(row["kind"], row["size"], tuple(row["channels"]))
        found.setdefault((work.kind, len(work.channels)), []).append(Measured(work, row["microseconds"]))
    return {key: tuple(rows) for key, rows in found.items()}


def nearest(target: str, work: Work) -> Measured | None:
    """Measurement at the nearest shape; None if the table has no row of this kind."""
    table, channels = cost_table(target), len(work.channels)
    # epilogues take all families about equally long
    rows = table.get((work.kind, channels)) or table.get((work.kind.partition(" + ")[0], channels))
    return min(rows, key=lambda row: row.distance(work)) if rows else None
