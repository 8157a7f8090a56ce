"""Range methods on histograms: percentile, mean squared error, and entropy.

Each maps the cells of a histogram and a spec to the range to quantize. All are arithmetic on the counts, so bit width,
scheme and method can be chosen after calibration, repeatedly, without the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from quantc.errors import ObservationError
from quantc.observe import range_costs
from quantc.observe.buckets import Cells, Floats
from quantc.observe.range_costs import between_neighbours, grid_of
from quantc.spec.formats import Scheme
from quantc.spec.numerics import qparams_from_range
from quantc.spec.spec import Option, QuantSpec
from quantc.support.validated import Frozen

COARSE, FINE, FINEST = 32, 12, 8
"""The number of thresholds tried: over the whole interval, then twice between the neighbours of the best."""
SPARSE, CHECKS = 4, 2
"""The number of candidates for each of two ends, and of rounds, once there is an estimate."""
NARROW = 0.05
"""Cells narrower than this, in steps, are treated as points: the exact formula would cancel."""


class RangeMethod(Frozen, ABC, frozen=True):
    """A method to choose the range from a histogram; its fields are the options."""

    noun: ClassVar[str] = "range method"

    @abstractmethod
    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        """The range to quantize."""


class Extremes(RangeMethod, frozen=True):
    """The full observed range."""

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        return cells.low, cells.high


class Percentile(RangeMethod, frozen=True):
    """The interval between two percentiles: 99.99 clips one element in 10 000 at either end."""

    percentile: float = Field(default=99.99, gt=50, le=100)

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        ends = np.cumsum(cells.mass)
        above = ends[-1] * self.percentile / 100
        return _value_at(cells, ends, ends[-1] - above), _value_at(cells, ends, above)


class MeanSquaredError(RangeMethod, frozen=True):
    """The range of least squared error, rounding and clipping together."""

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        _refuse_float(self, spec)
        least, most = _reaches(cells)
        # cells that round to zero at every threshold cost the same at each
        kept = cells.only(cells.magnitude >= 0.4 * max(least / spec.levels, spec.eps))
        if not len(kept.mass):
            return cells.low, cells.high
        if spec.scheme is Scheme.SYMMETRIC:
            return _one_reach(cells, kept, least, most, spec)
        return _two_ends(cells, kept, spec)


class Entropy(RangeMethod, frozen=True):
    """The range of least Kullback-Leibler divergence from the data."""

    def range(self, cells: Cells, spec: QuantSpec) -> tuple[float, float]:
        _refuse_float(self, spec)
        kept = ~cells.is_tiny
        if not kept.any():
            return cells.low, cells.high
        solid = cells.only(kept)
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
"""Range methods by their name in a spec's `observe`. `l2norm` and `histogram` are aliases of `mse`."""


def method_of(name: str, options: Mapping[str, Option], *, where: str = "") -> RangeMethod:
    """The range method of a spec."""
    if name not in METHODS:
        raise ObservationError(
            f"a histogram gives no {name} range",
            where=where or None,
            advice=f"derive one of: {', '.join(METHODS)}",
        )
    return METHODS[name].model_validate(dict(options))


# -- what a range costs ----------------------------------------------------------------------------------------


def squared_error(cells: Cells, low: Floats, high: Floats, spec: QuantSpec) -> Floats:
    """The sum of squared errors for each range, with elements uniformly distributed within their cell.

    Measured in steps, the error at t is t - clamp(round(t)). Its square has the antiderivative n/12 + r^3/3, where n is
    the level of t and r the remainder: inside the range and outside, so one formula serves for rounding and for
    clipping.
    """
    scale, first, last = _levels(low, high, spec)
    is_wide = cells.right - cells.left >= NARROW * scale.min()
    wide, narrow = cells.only(is_wide), cells.only(~is_wide)
    left, right, middle = wide.left / scale, wide.right / scale, narrow.middle / scale
    mean = (_antiderivative(right, first, last) - _antiderivative(left, first, last)) / (right - left)
    rest = middle - np.clip(np.round(middle), first, last)
    total: Floats = (mean @ wide.mass + (rest * rest) @ narrow.mass) * (scale * scale).reshape(-1)
    return total


def _antiderivative(t: Floats, first: Floats, last: Floats) -> Floats:
    level = np.clip(np.round(t), first, last)
    rest = t - level
    return level / 12 + rest * rest * rest / 3


def divergence(cells: Cells, low: Floats, high: Floats, spec: QuantSpec) -> Floats:
    """The Kullback-Leibler divergence of each range's levels from the data.

    Clipped mass is added to the outermost cells inside, and each level distributes its mass over its cells by their
    width. Cells of zero are left out: zero is exact in any range.
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
    """The clipped mass, at the outermost cells inside."""
    rows = np.arange(len(steps))
    extra = np.zeros_like(steps)
    first_inside = inside.argmax(1)
    last_inside = steps.shape[1] - 1 - inside[:, ::-1].argmax(1)
    columns = np.arange(steps.shape[1])
    extra[rows, first_inside] += np.where(columns < first_inside[:, None], cells.mass, 0.0).sum(1)
    extra[rows, last_inside] += np.where(columns > last_inside[:, None], cells.mass, 0.0).sum(1)
    return extra


def _levels(low: Floats, high: Floats, spec: QuantSpec) -> tuple[Floats, Floats, Floats]:
    """Scale, first and last level (relative to the zero point) of each range, as quantization computes them."""
    found = qparams_from_range(torch.from_numpy(low).float(), torch.from_numpy(high).float(), spec)
    zero_point = found.zero_point.double().numpy()[:, None]
    return found.scale.double().numpy()[:, None], spec.qmin - zero_point, spec.qmax - zero_point


# -- searching -------------------------------------------------------------------------------------------------


def _search(cost: Callable[[Floats], Floats], least: float, most: float) -> float:
    """The threshold of least cost: over a coarse grid, then finer ones around the best. The widest wins a tie."""
    grid = grid_of(most, least, COARSE)
    for count in (FINE, FINEST):
        best = int(cost(grid).argmin())
        grid = between_neighbours(grid, best, count)
    return float(grid[int(cost(grid).argmin())])


def _reaches(cells: Cells) -> tuple[float, float]:
    """The least and the greatest candidate threshold: the median magnitude of what is not tiny, and the maximum."""
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


def _one_reach(cells: Cells, kept: Cells, least: float, most: float, spec: QuantSpec) -> tuple[float, float]:
    """The best symmetric range: estimated, then exact around the estimate and on the whole grid."""
    estimate = range_costs.best_reach(kept, grid_of(most, least, range_costs.COARSE), spec)
    reaches = np.unique(np.append(grid_of(most, least, COARSE), _around(estimate, most)))[::-1]
    found = most
    for _ in range(CHECKS + 1):
        best = int(squared_error(kept, *_clip(cells, reaches), spec).argmin())
        found, reaches = float(reaches[best]), between_neighbours(reaches, best, FINE)
    low, high = _clip(cells, np.array([found]))
    return float(low[0]), float(high[0])


def _two_ends(cells: Cells, kept: Cells, spec: QuantSpec) -> tuple[float, float]:
    """The best asymmetric range: estimated, then exact around the estimate and on the whole grid."""
    down, up = max(-cells.low, 0.0), max(cells.high, 0.0)
    below, above = kept.only(kept.middle < 0), kept.only(kept.middle > 0)
    least_down, least_up = _median(below.magnitude, below.mass), _median(above.magnitude, above.mass)
    downs, ups = grid_of(down, least_down, range_costs.COARSE), grid_of(up, least_up, range_costs.COARSE)
    near_down, near_up = range_costs.best_ends(kept, downs, ups, spec)
    downs = np.unique(np.append(grid_of(down, least_down, SPARSE), _around(near_down, down)))[::-1]
    ups = np.unique(np.append(grid_of(up, least_up, SPARSE), _around(near_up, up)))[::-1]
    found = (down, up)
    for _ in range(CHECKS):
        low, high = (side.reshape(-1) for side in np.meshgrid(-downs, ups, indexing="ij"))
        best = divmod(int(squared_error(kept, low, high, spec).argmin()), len(ups))
        found = float(downs[best[0]]), float(ups[best[1]])
        downs, ups = between_neighbours(downs, best[0], SPARSE), between_neighbours(ups, best[1], SPARSE)
    return -found[0], found[1]


def _around(estimate: float, most: float) -> Floats:
    """An estimate and its neighbours."""
    places: Floats = np.minimum(np.array([estimate * 0.97, estimate, estimate * 1.03]), most)
    return places


def _value_at(cells: Cells, ends: Floats, count: float) -> float:
    """The value below which `count` elements lie; uniformly distributed within a cell."""
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
