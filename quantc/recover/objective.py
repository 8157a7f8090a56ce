"""The error of a layer's output that rounding its weights makes, on the half of the batches that weights are fitted to and
on the half they are judged on.

Weights come by groups, `[groups, outputs, inputs]`: rows of the problem `y = W x`. Of a change `E` of the weights and one
`d` of the bias, the mean squared error of the output is `E G Eᵀ − 2 d E m + d²`, with the mean outer product `G` and the
mean `m` of what the layer reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.errors import QuantcError
from quantc.observe.gram import Gram
from quantc.observe.moments import Moments as ChannelMoments
from quantc.observe.tokens import Tokens
from quantc.spec.halves import Halves
from quantc.spec.statistic import Statistic


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Mean outer product `[groups, inputs, inputs]` and mean `[groups, inputs]` of what a layer reads, in float64."""

    known: Tensor
    """The mean outer product; or its diagonal, `[groups, inputs]`: then inputs are taken to be independent."""
    mean: Tensor
    rows: int

    @property
    def energy(self) -> Tensor:
        """Mean square of each input, `[groups, inputs]`."""
        return self.known if self.known.dim() == 2 else self.known.diagonal(dim1=1, dim2=2)

    @property
    def products(self) -> Tensor:
        if self.known.dim() == 3:
            return self.known
        return torch.diag_embed(self._variance()) + self.mean.unsqueeze(2) * self.mean.unsqueeze(1)

    def _variance(self) -> Tensor:
        return (self.energy - self.mean.square()).clamp_(min=0)

    def error(self, change: Tensor, shift: Tensor | None = None) -> Tensor:
        """Mean squared error of each output, `[groups, outputs]`, of a change of the weights, and of the bias."""
        change = change.double()
        if self.known.dim() == 3:
            found = (change @ self.known * change).sum(2)
        else:
            found = (change.square() @ self._variance().unsqueeze(2)).squeeze(2) + self.drift(change).square()
        if shift is not None:
            found = found - 2 * shift * self.drift(change) + shift.square()
        return found.clamp_(min=0)  # rounding may leave less than nothing

    def steady_error(self, change: Tensor, shift: Tensor | None = None) -> Tensor:
        """`error`, where inputs have a little energy more than they had: that of weights which hardly met any counts too."""
        return self.error(change, shift) + self.steadying(change)

    def steadying(self, change: Tensor) -> Tensor:
        """What `steady_error` adds to `error`, without the products that take the time."""
        every = self.energy
        mean = _mean(every)
        unseen = torch.where(every > 0, mean * share_added(every.shape[-1], self.rows), mean)
        return (change.double().square() @ unseen.unsqueeze(2)).squeeze(2)

    def drift(self, change: Tensor) -> Tensor:
        """Mean change of each output, `[groups, outputs]`."""
        return (change.double() @ self.mean.unsqueeze(2)).squeeze(2)

    def merged(self, other: Moments) -> Moments:
        """The moments of the rows of both."""
        rows = self.rows + other.rows
        share = self.rows / rows
        return Moments(
            self.known * share + other.known * (1 - share), self.mean * share + other.mean * (1 - share), rows
        )

    def about_mean(self) -> Tensor:
        """The covariance: what is left of `products` if the bias takes up the mean."""
        return self.products - self.mean.unsqueeze(2) * self.mean.unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The moments to fit to, and those to judge by."""

    fit: Moments
    judge: Moments

    @staticmethod
    def of(seen: Sequence[Halves], groups: int = 1) -> Objective:
        """The objective of a weight that several inputs meet: all of them count as much as they have rows. Counts of indices
        are of a table of so many groups, one for each row."""
        return Objective(*(_moments([getattr(each, half) for each in seen], groups) for half in ("even", "odd")))

    def of_all(self) -> Objective:
        """The objective of both halves together."""
        every = self.fit.merged(self.judge)
        return Objective(every, every)


def why_not(seen: Sequence[Halves], shape: tuple[int, int]) -> str | None:
    """The reason why weights of some groups and inputs cannot be fitted to statistics; None if they can."""
    even, odd = (sum(getattr(each, half).seen for each in seen) for half in ("even", "odd"))
    if not even:
        return "no batch reached it"
    if not odd:
        return "only one half of the batches reached it: there is nothing to judge on"
    for half in (half for each in seen for half in (each.even, each.odd)):
        total = half.total if isinstance(half, Gram | ChannelMoments) else None
        if total is not None and total.upper.shape != shape:
            return f"what was collected has {'x'.join(map(str, total.upper.shape))} channels, and it reads {shape[0]}x{shape[1]}"
        if isinstance(half, Tokens) and len(half.counts) > shape[0]:
            return f"what was collected has {len(half.counts)} indices, and it has {shape[0]} rows"
    return None


def _moments(every: Sequence[Statistic], groups: int) -> Moments:
    found: Moments | None = None
    for each in every:
        if each.seen:
            own = _of_statistic(each, groups)
            found = own if found is None else found.merged(own)
    if found is None:
        raise QuantcError("nothing was collected", advice="ask `why_not` first")
    return found


def _of_statistic(seen: Statistic, groups: int) -> Moments:
    if isinstance(seen, Gram):
        return Moments(seen.matrix() / seen.seen, seen.mean(), seen.seen)
    if isinstance(seen, ChannelMoments):
        return Moments(seen.mean_square(), seen.mean(), seen.seen)
    if isinstance(seen, Tokens):  # the input of each row is 1 or 0, so that its mean and mean square are its share
        share = torch.zeros(groups, 1, dtype=torch.float64)
        share[: len(seen.counts), 0] = seen.counts.double() / seen.seen
        return Moments(share, share, seen.seen)
    raise QuantcError(f"{seen.statistics} does not tell how rows are distributed", advice="collect gram or moments")


def damped(products: Tensor, rows: int) -> tuple[Tensor, Tensor, float]:
    """The Cholesky factor that rounding in order takes: `U` of unit diagonal with `U D Uᵀ = products`, but for what was
    added to the diagonal, and how much that was, as a share of its mean.

    Dead channels get the mean, so that their weights are rounded to nearest. Where fewer rows than channels were seen,
    the rest of the space is unknown: more is added there.
    """
    matrix = products.clone()
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    mean = _mean(diagonal)
    alive = torch.where(diagonal > 0, diagonal, diagonal + mean)
    share = share_added(products.shape[-1], rows)
    while True:
        diagonal.copy_(alive + mean * share)
        # the factor from the last channel on, as the error of a channel is taken up by those after it
        lower, info = torch.linalg.cholesky_ex(matrix.flip(1, 2))
        if not bool(info.any()):
            upper = lower.flip(1, 2)
            return matrix, upper / upper.diagonal(dim1=1, dim2=2).unsqueeze(1), share
        share *= 10


def remaining(matrix: Tensor, unit: Tensor) -> Tensor:
    """What an error of each channel costs, `[groups, inputs]`, once the channels after it have taken up what they can: the
    `D` of `U D Uᵀ = matrix`."""
    diagonal = matrix.diagonal(dim1=1, dim2=2).unsqueeze(2)
    found: Tensor = torch.linalg.solve_triangular(unit.square(), diagonal, upper=True, unitriangular=True)
    return found.squeeze(2)


def share_added(width: int, rows: int) -> float:
    """The share of the mean that is added to the diagonal: more where the rows are few for the channels, as a fit to them
    says less about others."""
    return max(0.01, min(0.3, width / (2 * rows)))


def _mean(energy: Tensor) -> Tensor:
    """Mean over inputs, `[groups, 1]`; 1 where there is nothing."""
    mean = energy.mean(1, keepdim=True)
    return torch.where(mean > 0, mean, torch.ones_like(mean))
