"""Underflow check: tensors whose range is so small that `eps` clamps the scale and most levels are unused.

A scale is never finer than the spec's `eps` (2^-12 for activations). Values around 1e-6 then all become zero, though
nothing failed: so reports name these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from quantc.calibration.observed_tensors import data_groups
from quantc.errors import UnknownNameError
from quantc.ir.plan import Group
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.minmax import MinMax
from quantc.observe.moving_average import MovingAverage
from quantc.qdq.ops import belongs_to_qdq
from quantc.spec.formats import Scheme
from quantc.spec.granularity import extremes
from quantc.spec.observation import Observation
from quantc.spec.spec import QuantSpec

COARSE = "warning: "
"""Prefix of these notes in the log."""
MIN_SHARE = 0.5
"""Smallest share of its levels that a tensor must use. Half of them is one bit, 6 dB: as much as a range loses that is later
half as wide. Below that the format itself is in question."""


@dataclass(frozen=True, slots=True)
class Coarse:
    """One tensor, or several that share a scale."""

    group: str
    where: str
    """The node that makes the first of them, and where that comes from."""
    low: float
    high: float
    scale: float
    """The smallest that is allowed, and coarser than these numbers ask for."""
    levels: int
    """Number of distinct integers the values map to."""
    of: int

    def __str__(self) -> str:
        if self.low == self.high == 0:
            told = "calibration saw only zeros, so that other numbers are cut off near them"
        elif self.levels == 1:
            told = "every number becomes zero"
        else:
            told = f"they come to {self.levels} of {self.of} levels"
        return (
            f"{self.where}: numbers within {self.low:.3g}..{self.high:.3g} have the smallest scale allowed, "
            f"{self.scale:.3g}: {told}"
        )


def coarse_groups(program: Program) -> Iterator[Coarse]:
    """Calibrated groups that use less than half of their levels, because `eps` clamps the scale."""
    places = Places(program)
    for group, spec in data_groups(program):
        low, high = extremes_of(program.plan.statistics.get(group.name))
        reach = None if low is None or high is None else coarse_reach(spec, low, high)
        if low is None or high is None or reach is None:
            continue
        yield Coarse(group.name, _where(program, places, group), low, high, spec.eps, *reach)


def _where(program: Program, places: Places, group: Group) -> str:
    """The node that makes a tensor: in a quantized program, the one before it was quantized. In integer form it may
    have become part of another: then where the tensor is read, or the name of the group."""
    for site in group.places:
        try:
            node = places.value(site)
        except UnknownNameError:
            continue
        while belongs_to_qdq(node) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return program.describe(node)
    return group.name


def coarse_reach(spec: QuantSpec, low: float, high: float) -> tuple[int, int] | None:
    """Number of levels that a range uses, and the number with the scale it calls for; None if that is not less than half."""
    if spec.dtype.is_float:
        return None
    low, high = min(low, 0.0), max(high, 0.0)
    width = 2 * max(-low, high) if spec.scheme is Scheme.SYMMETRIC else high - low
    needed = width / (spec.levels - 1)
    if needed >= spec.eps:
        return None
    levels = round(high / spec.eps) - round(low / spec.eps) + 1
    # a symmetric range that is used on one side has half of the levels to begin with
    wanted = round(high / needed) - round(low / needed) + 1 if needed else spec.levels
    return (levels, wanted) if levels < wanted * MIN_SHARE else None


def coarse_channels(spec: QuantSpec, weight: Tensor) -> str | None:
    """Message on a weight in which `eps` clamps some scales; None if there are none. Channels of zeros do not count."""
    if spec.dtype.is_float:
        return None
    lows, highs = (found.flatten().tolist() for found in extremes(weight.detach().float(), spec.granularity))
    ends = [(low, high) for low, high in zip(lows, highs, strict=True) if low or high]
    lost = [reach[0] for low, high in ends if (reach := coarse_reach(spec, low, high)) is not None]
    if not lost:
        return None
    counts = f"{lost[0]}" if len(lost) == 1 else f"between {min(lost)} and {max(lost)}"
    return (
        f"{len(lost)} of {len(lows)} scales are the smallest allowed, {spec.eps:.3g}, and should be finer: "
        f"their numbers come to {counts} of {spec.levels} levels"
    )


def extremes_of(observation: Observation | None) -> tuple[float | None, float | None]:
    """Smallest and largest observed value; None if nothing was observed, or the observation keeps none."""
    kept: object = getattr(observation, "extremes", observation)  # histograms and recordings keep them apart
    if not isinstance(kept, MinMax | MovingAverage) or kept.low is None or kept.high is None:
        return None, None
    return float(kept.low.min()), float(kept.high.max())
