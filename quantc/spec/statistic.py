"""The protocol of statistics: monoids over the batches of a calibration, in bits.

A statistic is fed a batch at a time, and the batch is its atom: an empty one is the identity of `merge`, and any order of
the batches and any split of them among processes gives the same bits. Observations (`quantc.spec.observation`) are the
statistics from which qparams are derived; the others describe what a layer reads, for passes that fit its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from quantc.errors import ObservationError
from quantc.spec.observation import Order, State
from quantc.spec.spec import Option


@dataclass(frozen=True, eq=False)
class Scale:
    """Each channel of the tensor multiplied by a number: `x * factors`."""

    factors: Tensor


@dataclass(frozen=True, eq=False)
class Permutation:
    """The channels of the tensor in another order: `x[..., index]`."""

    index: Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """The channels of the tensor multiplied by a matrix: `x @ matrix`."""

    matrix: Tensor


Change = Scale | Permutation | Rotation
"""A linear change of a tensor, along its channels."""


@runtime_checkable
class Statistic(Protocol):
    """A mergeable statistic of the rows of a tensor. Rows come as `[groups, rows, channels]`: a grouped convolution
    reads the channels of each group apart."""

    statistics: ClassVar[str]
    """The name, in the registry and in saved files."""
    order: ClassVar[Order]

    @classmethod
    def empty(cls, options: Mapping[str, Option]) -> Self:
        """A statistic without data. Unknown options are a SpecError."""
        ...

    @property
    def seen(self) -> int:
        """The number of rows."""
        ...

    def update(self, x: Tensor, *, batch: int = 0, where: str = "") -> None:
        """Add the finite rows of one batch."""
        ...

    def merge(self, other: Self) -> Self:
        """The statistic of both data sets together. Neither operand is changed."""
        ...

    def carried(self, by: Change) -> Self | None:
        """The statistic of the tensor after a change; None where only the data tells."""
        ...

    def to_state(self) -> State: ...

    @classmethod
    def from_state(cls, state: State) -> Self:
        """The inverse of `to_state`. LoadError, naming the field, on anything else."""
        ...


def carried(statistic: Any, by: Change) -> Any:
    """A statistic or observation after a linear change of its tensor; None if the tensor must be seen again."""
    change = getattr(statistic, "carried", None)
    return None if change is None else change(by)


def check_same_kind(left: Statistic, right: Statistic) -> None:
    """Raise ObservationError unless two statistics are of one type."""
    if type(left) is not type(right):
        raise ObservationError(
            f"{left.statistics} cannot be merged with {right.statistics}",
            advice="merge statistics that were collected in the same way",
        )


def check_widths(left: torch.Size, right: torch.Size, where: str = "") -> None:
    """Raise ObservationError unless two statistics are of tensors of the same channels."""
    if left != right:
        raise ObservationError(
            f"statistics of {_channels(left)} cannot take in {_channels(right)}",
            where=where or None,
            advice="collect them from the same program",
        )


def _channels(shape: torch.Size) -> str:
    groups, width = shape[0], shape[-1]
    return f"{width} channels" if groups == 1 else f"{groups} groups of {width} channels"
