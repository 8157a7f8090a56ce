"""The search behind `fit`: for each row of weights, the qparams of least squared error.

A clipping scale is bounded from below: the clipping error alone would exceed the error of min-max. Between that bound
and a little above min-max a coarse grid is searched, with the two zero points that split the clipping evenly, then
finer grids around the best; finally the scale is refined by least squares for the current levels, a few times. Each
scale is rounded as the spec requires before it is tried. Errors are measured in steps of min-max, so that neither tiny
nor huge weights leave the range of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from quantc.spec.formats import PerChannel, PerGroup, PerToken, Role, Scheme, Timing
from quantc.spec.numerics import QParams, allowed_scale, fake_quantize
from quantc.spec.spec import QuantSpec

BLOCK = 1 << 18
"""The number of weights processed together, so that intermediates stay in the cache."""
HEIGHT = 64
"""Rows are cut into columns of at most this many weights. Per-column values are then contiguous, which is twice as fast
as broadcasting them along it."""

COARSE, FINE = 4, (2, 1)
"""Bisections of the interval between two scales: in the first grid, then around the best."""
LEAST_SQUARES = 2
"""The number of least squares refinements."""
ON_A_LEVEL = 4
"""The number of scales tried at which an extreme lies on a level."""
NARROWEST, WIDEST = 2.0**-8, 1.25
"""Bounds of the first grid in multiples of min-max's scale, if no tighter bound is known. A few weights may happen to
lie near the levels of a coarser scale."""


def best_qparams(rows: Tensor, start: QParams, spec: QuantSpec) -> QParams:
    """Qparams for each row of a matrix. `start` are those of min-max; no row has a larger error than with them."""
    scale, zero_point = start.scale.clone(), start.zero_point.clone()
    count = max(1, BLOCK // rows.shape[1])
    for first in range(0, rows.shape[0], count):
        part = slice(first, first + count)
        given = QParams(start.scale[part], start.zero_point[part])
        found = _Search(rows[part], given, spec).run()
        better = _squared_error(rows[part], found, spec) < _squared_error(rows[part], given, spec)
        scale[part] = torch.where(better, found.scale, given.scale)
        zero_point[part] = torch.where(better, found.zero_point, given.zero_point)
    return QParams(scale, zero_point)


def _squared_error(rows: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """The squared error of each row as the program will compute it, in float64."""
    total = torch.zeros(rows.shape[0], dtype=torch.float64)
    like_program = _by_row(qparams, spec)
    for piece in _pieces(rows):
        total += _total((piece.double() - fake_quantize(piece, *like_program)).square_(), 1)
    return total


def _by_row(qparams: QParams, spec: QuantSpec) -> tuple[QParams, QuantSpec]:
    """Qparams and a spec with which the rows of a matrix are rounded like the tensor they are taken from: with the zero
    point added before rounding for groups, and after it otherwise."""
    spec = spec.but(observe=None, timing=Timing.STATIC)
    if not isinstance(spec.granularity, PerGroup):
        return qparams, spec.but(granularity=PerChannel(axis=0))
    column = QParams(qparams.scale.unsqueeze(1), qparams.zero_point.unsqueeze(1))
    return column, spec.but(granularity=PerToken(), role=Role.ACT)


def _pieces(rows: Tensor) -> Iterator[Tensor]:
    """Rows longer than a block, split into pieces that fit one."""
    for first in range(0, rows.shape[1], BLOCK):
        yield rows[:, first : first + BLOCK]


@dataclass(frozen=True, eq=False)
class _Columns:
    """A transposed matrix: each row becomes one column, or several if it is long."""

    weights: Tensor
    each: int
    """The number of columns of a row."""

    @staticmethod
    def of(rows: Tensor) -> _Columns:
        count, length = rows.shape
        each = ceil(length / HEIGHT)
        height = ceil(length / each)
        # zero is exact at every scale, so it can pad the last column
        padded = torch.nn.functional.pad(rows, (0, each * height - length))
        return _Columns(padded.reshape(count * each, height).t().contiguous(), each)

    def errors(self, inverse: Tensor, below: Tensor, steps: int) -> Tensor:
        """The squared error, in steps, of each candidate (first axis) for each row."""
        found = torch.empty(inverse.shape[0], self.weights.shape[1])
        exact, levels = torch.empty_like(self.weights), torch.empty_like(self.weights)
        halves = _halves(levels, 0)  # hoisted: slicing takes as long as adding
        candidates = zip(*map(self._spread, (inverse, -below, steps - below)), found.unbind(), strict=True)
        for one, first, last, out in candidates:
            torch.mul(self.weights, one, out=exact)
            torch.round(exact, out=levels)
            torch.clamp(levels, first, last, out=levels)
            levels.sub_(exact).square_()
            for left, right in halves:
                left.add_(right)
            out.copy_(levels[0])
        return self._gather(found)

    def products(self, inverse: Tensor, below: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """For one candidate, the sums of weight (in steps) times level and of level squared."""
        (one,), (first,), (last,) = map(self._spread, (inverse, -below, steps - below))
        exact = self.weights * one
        levels = torch.round(exact).clamp(first, last)
        sums = torch.stack([_total(exact.mul_(levels), 0), _total(levels.square_(), 0)])
        weight_level, level_level = self._gather(sums).unbind()
        return weight_level, level_level

    def _spread(self, table: Tensor) -> tuple[Tensor, ...]:
        return (table if self.each == 1 else table.repeat_interleave(self.each, 1)).unbind()

    def _gather(self, sums: Tensor) -> Tensor:
        return _total(sums.double().reshape(sums.shape[0], -1, self.each), -1)


def _halves(x: Tensor, axis: int) -> list[tuple[Tensor, Tensor]]:
    """Halves of a tensor to add to one another, in place and in this order, until the first slice is the total.

    torch's own sums depend on the number of threads and on the machine. These have the same bits everywhere.
    """
    parts, count = [], x.shape[axis]
    while count > 1:
        half = count // 2
        parts.append((x.narrow(axis, 0, half), x.narrow(axis, count - half, half)))
        count -= half
    return parts


def _total(x: Tensor, axis: int) -> Tensor:
    """The sums along an axis, computed in place."""
    for left, right in _halves(x, axis):
        left.add_(right)
    return x.select(axis, 0)


class _Search:
    """The search for a block of rows. Zero points are counted from the lowest level: `below` levels lie below zero."""

    def __init__(self, rows: Tensor, start: QParams, spec: QuantSpec) -> None:
        self.spec = spec
        self.steps = spec.qmax - spec.qmin
        self.columns = [_Columns.of(piece) for piece in _pieces(rows)]
        self.unit = start.scale
        low, high = torch.aminmax(rows, dim=1)
        self.down, self.up = (-low / self.unit).clamp(min=0), (high / self.unit).clamp(min=0)
        self.norm = self._norm(rows)
        self.scale, self.below = start.scale, (start.zero_point - spec.qmin).float()
        self.error = self._errors(self.scale.unsqueeze(0), self.below.unsqueeze(0))[0]

    def run(self) -> QParams:
        narrowest = self._narrowest()
        ratio = _root(WIDEST / narrowest, COARSE)
        self._try(torch.cat([_powers(narrowest * self.unit, ratio, 1 << COARSE), self._with_an_end_on_a_level()]))
        for halvings in FINE:
            ratio = _root(ratio, halvings)
            self._try_near(ratio, (1 << halvings) - 1)
        for _ in range(LEAST_SQUARES):
            self._try_least_squares()
        return QParams(self.scale, self.below.to(torch.int64) + self.spec.qmin)

    def _norm(self, rows: Tensor) -> tuple[Tensor, float]:
        """The Euclidean norm of each row, in steps, and the square root of its number of elements."""
        inverse = (1.0 / self.unit).unsqueeze(1)
        total = torch.zeros(rows.shape[0], dtype=torch.float64)
        for piece in _pieces(rows):
            total += _total((piece * inverse).double().square_(), 1)
        return total.sqrt(), rows.shape[1] ** 0.5

    def _narrowest(self) -> Tensor:
        """Lower bound on the scale, in multiples of min-max's: nothing below can be better than min-max.

        With d and u clipped at the ends the error is at least d^2 + u^2, so d + u is at most the square root of twice
        the error of min-max. And a row of norm l whose n elements are clipped to c is at least l - c sqrt(n) away.
        """
        norm, root = self.norm
        by_ends = (self.down + self.up).double() - (2 * self.error).sqrt()
        by_norm = (norm - self.error.sqrt()) / root
        return (torch.maximum(by_ends, by_norm) / self.steps).clamp(NARROWEST, 1.0).float()

    def _with_an_end_on_a_level(self) -> Tensor:
        """The finest scales at which the extreme farther from zero is exact. Among them is the scale of weights on a
        lattice, such as those of a model that was quantized before."""
        reach = torch.maximum(self.down, self.up)
        finest = (reach + 2.0**-8).floor()  # as wide as all levels, but for rounding
        return torch.stack([reach * self.unit / (finest - fewer).clamp(min=1) for fewer in range(ON_A_LEVEL)])

    def _errors(self, scale: Tensor, below: Tensor) -> Tensor:
        """The squared error of each candidate (first axis) for each row, in squares of min-max's step."""
        inverse = 1.0 / scale
        total = torch.zeros(scale.shape, dtype=torch.float64)
        for columns in self.columns:
            total += columns.errors(inverse, below, self.steps)
        return total * (scale / self.unit).double().square()

    def _rounded(self, scale: Tensor) -> Tensor:
        """Scales rounded as the spec requires."""
        return allowed_scale(scale, self.spec)

    def _try(self, scale: Tensor) -> None:
        """Try scales (first axis), each with its candidate zero points."""
        scale = self._rounded(scale)
        if self.spec.scheme is Scheme.SYMMETRIC:
            return self._keep(scale, self.below.expand_as(scale))
        # clip equally at both ends, or half a step more at one
        even = self.steps / 2 + (self.down - self.up) / 2 * (self.unit / scale)
        below = torch.cat([even.floor(), even.ceil()]).clamp_(0, self.steps)
        return self._keep(torch.cat([scale, scale]), below)

    def _try_near(self, ratio: Tensor, count: int) -> None:
        """Try some scales on either side of the best, in steps of a factor `ratio`."""
        sides = [_powers(self.scale, factor, count)[1:] for factor in (ratio, 1 / ratio)]
        scale = self._rounded(torch.cat(sides))
        self._keep(scale, self.below.expand_as(scale))

    def _try_least_squares(self) -> None:
        """Try the least squares scale for the current levels."""
        inverse, below = (1.0 / self.scale).unsqueeze(0), self.below.unsqueeze(0)
        products = [columns.products(inverse, below, self.steps) for columns in self.columns]
        weight_level, level_level = (_total(torch.stack(list(part)), 0) for part in zip(*products, strict=True))
        factor = torch.where(level_level > 0, weight_level / level_level, 1.0).float()
        self._keep(self._rounded(self.scale * factor).unsqueeze(0), below)

    def _keep(self, scale: Tensor, below: Tensor) -> None:
        """Keep the best candidate of each row, if it improves on the current one."""
        error, index = self._errors(scale, below).min(0)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale.gather(0, index.unsqueeze(0))[0], self.scale)
        self.below = torch.where(better, below.gather(0, index.unsqueeze(0))[0], self.below)


def _root(x: Tensor, halvings: int) -> Tensor:
    """The 2^halvings-th root, by square roots, which have the same bits everywhere."""
    for _ in range(halvings):
        x = x.sqrt()
    return x


def _powers(first: Tensor, ratio: Tensor, count: int) -> Tensor:
    """A geometric series: `first` and `count` more terms."""
    found = [first]
    for _ in range(count):
        found.append(found[-1] * ratio)
    return torch.stack(found)
