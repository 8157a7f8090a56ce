"""Ranges from histograms: percentile, mean squared error, and entropy.

Each takes the cells of a histogram and a spec and gives the range to quantize. All are arithmetic on the counts, so
bit width, scheme and method can be chosen after calibration, again and again, without the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from quantc.errors import ObservationError
from quantc.frozen import Frozen
from quantc.numerics import qparams_from_range
from quantc.observe.buckets import Cells, Floats
from quantc.spec import Option, QuantSpec

COARSE, FINE, ROUNDS = 48, 16, 2
"""Thresholds tried at first, then between the neighbours of the best, and how often the two ends take turns."""
NARROW = 1e-2
"""Cells narrower than this, in steps, are taken as points: the exact formula would cancel."""

Cost = Callable[[Cells, Floats, Floats, QuantSpec], Floats]
"""What quantizing to each of some ranges costs."""


class RangeMethod(Frozen):
    """A way to choose the range from a histogram; its fields are the options."""

    noun: ClassVar[str] = "range method"

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        """The range to quantize."""
        raise NotImplementedError


class Extremes(RangeMethod):
    """All that was seen."""

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        return cells.low, cells.high


class Percentile(RangeMethod):
    """What lies between two percentiles: of 99.99, one element in 10 000 is clipped at either end."""

    percentile: float = Field(default=99.99, gt=50, le=100)

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        ends = np.cumsum(cells.mass)
        above = ends[-1] * self.percentile / 100
        return _value_at(cells, ends, ends[-1] - above), _value_at(cells, ends, above)


class MeanSquaredError(RangeMethod):
    """The range with the least squared error, rounding and clipping together."""

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        _refuse_float(self, spec)
        reach = _search(lambda reach: squared_error(cells, *_clip(cells, reach), spec), *_reaches(cells))
        low, high = (float(end[0]) for end in _clip(cells, np.array([reach])))
        if spec.scheme == "symmetric":
            return low, high
        return _both_ends(cells, low, high, spec)


class Entropy(RangeMethod):
    """The range that keeps most of the information: least Kullback-Leibler divergence from the data."""

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        _refuse_float(self, spec)
        kept = ~cells.is_tiny
        if not kept.any():
            return cells.low, cells.high
        solid = Cells(cells.left[kept], cells.right[kept], cells.mass[kept], cells.is_tiny[kept])
        reach = _search(lambda reach: divergence(solid, *_clip(cells, reach), spec), *_reaches(cells))
        low, high = _clip(cells, np.array([reach]))
        return float(low[0]), float(high[0])


METHODS: Mapping[str, type[RangeMethod]] = {
    "minmax": Extremes,
    "percentile": Percentile,
    "mse": MeanSquaredError,
    "l2norm": MeanSquaredError,
    "histogram": MeanSquaredError,
    "entropy": Entropy,
}
"""Range methods by the name a spec's `observe` has. `l2norm` and `histogram` are other names of `mse`."""


def method_of(name: str, options: Mapping[str, Option], *, where: str = "") -> RangeMethod:
    """The range method a spec asks for."""
    if name not in METHODS:
        raise ObservationError(
            f"a histogram gives no {name} range",
            where=where or None,
            advice=f"derive one of: {', '.join(METHODS)}",
        )
    return METHODS[name].model_validate(dict(options))


# -- what a range costs ----------------------------------------------------------------------------------------


def squared_error(cells: Cells, low: Floats, high: Floats, spec: QuantSpec) -> Floats:
    """The sum of squared errors for each range, with elements spread evenly within their cell.

    Measured in steps, the error at t is t - clamp(round(t)). Its square has the antiderivative n/12 + r^3/3, where n
    is the level t goes to and r what is left: inside the range and outside, so one formula serves for rounding
    and for clipping.
    """
    scale, first, last = _levels(low, high, spec)
    left, right = cells.left / scale, cells.right / scale
    width = right - left
    middle = (left + right) / 2
    rest = middle - np.clip(np.round(middle), first, last)
    point = rest * rest + width * width / 12
    mean = (_antiderivative(right, first, last) - _antiderivative(left, first, last)) / np.where(width > 0, width, 1)
    error = np.where(width < NARROW, point, mean)
    total: Floats = (error * cells.mass).sum(1) * (scale * scale).reshape(-1)
    return total


def _antiderivative(t: Floats, first: Floats, last: Floats) -> Floats:
    level = np.clip(np.round(t), first, last)
    rest = t - level
    return level / 12 + rest * rest * rest / 3


def divergence(cells: Cells, low: Floats, high: Floats, spec: QuantSpec) -> Floats:
    """The Kullback-Leibler divergence of each range's levels from the data.

    What is clipped is added to the outermost cells inside, and each level spreads what it holds over its cells by
    their width. Cells of zero are left out: zero is exact in any range.
    """
    scale, first, last = _levels(low, high, spec)
    steps = cells.middle / scale
    inside = (steps >= first - 0.5) & (steps <= last + 0.5)
    level = np.clip(np.round(steps), first, last) - first
    slots = (level + np.arange(len(scale))[:, None] * spec.levels).astype(np.int64)
    held = np.where(inside, cells.mass, 0.0)
    spans = np.where(inside, cells.right - cells.left, 0.0) + np.finfo(np.float64).tiny
    size = len(scale) * spec.levels
    level_mass = np.bincount(slots.reshape(-1), held.reshape(-1), size)[slots]
    level_span = np.bincount(slots.reshape(-1), spans.reshape(-1), size)[slots]
    spread = level_mass * (spans / level_span)
    kept = held + _clipped(cells, steps, inside)
    ratio = np.where(kept > 0, kept, 1.0) / np.where(spread > 0, spread, 1.0)
    lost = np.where((kept > 0) & (spread > 0), kept * np.log(ratio), 0.0).sum(1) / cells.mass.sum()
    inner = held.sum(1) / cells.mass.sum()
    # the spread masses add up to what is inside: normalising them adds the logarithm of that share
    return np.where(inner > 0, lost + np.log(np.where(inner > 0, inner, 1.0)), math.inf)


def _clipped(cells: Cells, steps: Floats, inside: Any) -> Floats:
    """What is clipped, at the outermost cells inside."""
    rows = np.arange(len(steps))
    extra = np.zeros_like(steps)
    first_inside = inside.argmax(1)
    last_inside = steps.shape[1] - 1 - inside[:, ::-1].argmax(1)
    columns = np.arange(steps.shape[1])
    extra[rows, first_inside] += np.where(columns < first_inside[:, None], cells.mass, 0.0).sum(1)
    extra[rows, last_inside] += np.where(columns > last_inside[:, None], cells.mass, 0.0).sum(1)
    return extra


def _levels(low: Floats, high: Floats, spec: QuantSpec) -> tuple[Floats, Floats, Floats]:
    """Scale, first and last level (counted from zero) of each range, as the quantizer will have them."""
    found = qparams_from_range(torch.from_numpy(low).float(), torch.from_numpy(high).float(), spec)
    zero_point = found.zero_point.double().numpy()[:, None]
    return found.scale.double().numpy()[:, None], spec.qmin - zero_point, spec.qmax - zero_point


# -- searching -------------------------------------------------------------------------------------------------


def _search(cost: Callable[[Floats], Floats], least: float, most: float) -> float:
    """The threshold of least cost: over a coarse grid, then finer ones around the best. The widest wins a tie."""
    grid = _grid(most, least, COARSE)
    for _ in range(2):
        best = int(cost(grid).argmin())
        if len(grid) == 1:
            break
        grid = _grid(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], FINE)
    return float(grid[int(cost(grid).argmin())])


def _grid(most: float, least: float, count: int) -> Floats:
    """Thresholds in equal ratios, the widest first."""
    if most <= least or least <= 0:
        return np.array([most])
    return np.geomspace(most, least, count)


def _reaches(cells: Cells) -> tuple[float, float]:
    """The least and the greatest magnitude worth clipping at: the median of what is not next to zero, and all."""
    most = max(abs(cells.low), abs(cells.high))
    return _median(cells.magnitude, np.where(cells.is_tiny, 0.0, cells.mass)), most


def _median(values: Floats, mass: Floats) -> float:
    if not mass.any():
        return 0.0
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(mass[order])
    return float(values[order][int(np.searchsorted(ends, ends[-1] / 2))])


def _clip(cells: Cells, reach: Floats) -> tuple[Floats, Floats]:
    """The data's range, clipped to some magnitudes."""
    low, high = min(cells.low, 0.0), max(cells.high, 0.0)
    return np.maximum(-reach, low), np.minimum(reach, high)


def _both_ends(cells: Cells, low: float, high: float, spec: QuantSpec) -> tuple[float, float]:
    """Let the two ends of a range take turns in finding their best place."""
    negative, positive = cells.middle < 0, cells.middle > 0
    solid = np.where(cells.is_tiny, 0.0, cells.mass)
    for _ in range(ROUNDS):
        if cells.high > 0:
            least = _median(cells.magnitude[positive], solid[positive])
            high = _search(lambda ends, low=low: squared_error(cells, np.full_like(ends, low), ends, spec), least, cells.high)  # type: ignore[misc]
        if cells.low < 0:
            least = _median(cells.magnitude[negative], solid[negative])
            low = -_search(lambda ends, high=high: squared_error(cells, -ends, np.full_like(ends, high), spec), least, -cells.low)  # type: ignore[misc]
    return low, high


def _value_at(cells: Cells, ends: Floats, count: float) -> float:
    """The value below which `count` elements lie; evenly spread within a cell."""
    cell = min(int(np.searchsorted(ends, count)), len(ends) - 1)
    begin = ends[cell] - cells.mass[cell]
    share = (count - begin) / cells.mass[cell]
    return float(cells.left[cell] + min(max(share, 0.0), 1.0) * (cells.right[cell] - cells.left[cell]))


def _refuse_float(method: RangeMethod, spec: QuantSpec) -> None:
    if spec.dtype.is_float:
        raise ObservationError(
            f"{type(method).__name__} is defined for integer formats, and the spec asks for {spec.dtype.value}",
            advice="observe with minmax or percentile",
        )
