"""Counts of the lookups of each row of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError
from quantc.spec.observation import Order, State, no_options
from quantc.spec.spec import Option
from quantc.spec.statistic import Change, check_same_kind


@dataclass(eq=False, slots=True)
class Tokens:
    """Counts of indices."""

    statistics: ClassVar[str] = "tokens"
    order: ClassVar[Order] = Order.FREE

    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """By index, as far as the largest one seen."""

    @classmethod
    def empty(cls, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls()

    @property
    def seen(self) -> int:
        return int(self.counts.sum())

    def update(self, x: Tensor, *, batch: int = 0, where: str = "") -> None:
        self.counts = _added(self.counts, torch.bincount(x.reshape(-1)))

    def merge(self, other: Self) -> Self:
        check_same_kind(self, other)
        return type(self)(_added(self.counts, other.counts))

    def carried(self, by: Change) -> None:
        """None: indices have no channels."""

    def to_state(self) -> State:
        return State({"counts": self.counts}, {})

    @classmethod
    def from_state(cls, state: State) -> Self:
        counts = state.tensor("counts", torch.int64)
        if counts.dim() != 1 or bool((counts < 0).any()) or (len(counts) and not counts[-1]):
            raise LoadError("the tensor 'counts' is not a count for each index, as far as the largest")
        return cls(counts)


def _added(left: Tensor, right: Tensor) -> Tensor:
    total = torch.zeros(max(len(left), len(right)), dtype=torch.int64)
    total[: len(left)] += left
    total[: len(right)] += right
    return total
