"""A statistic of each half of the batches: passes fit on one, and are judged on the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from quantc.errors import LoadError, QuantcError
from quantc.spec.observation import State
from quantc.spec.spec import Option
from quantc.spec.statistic import Change, Statistic


@dataclass(eq=False, slots=True)
class Halves:
    """One statistic of the batches of even number, and one of those of odd number: a monoid as they are."""

    even: Statistic
    odd: Statistic

    @classmethod
    def empty(cls, kind: type[Statistic], options: Mapping[str, Option]) -> Self:
        return cls(kind.empty(options), kind.empty(options))

    @property
    def statistics(self) -> str:
        """The name of the statistic."""
        return self.even.statistics

    @property
    def seen(self) -> int:
        return self.even.seen + self.odd.seen

    def update(self, x: Tensor, *, batch: int, where: str = "") -> None:
        (self.odd if batch % 2 else self.even).update(x, batch=batch, where=where)

    def merge(self, other: Self) -> Self:
        return type(self)(self.even.merge(other.even), self.odd.merge(other.odd))

    def carried(self, by: Change) -> Self | None:
        even, odd = self.even.carried(by), self.odd.carried(by)
        return None if even is None or odd is None else type(self)(even, odd)

    def whole(self) -> Statistic:
        """The statistic of all batches."""
        return self.even.merge(self.odd)

    def to_state(self) -> State:
        even, odd = self.even.to_state(), self.odd.to_state()
        tensors = {f"even.{name}": x for name, x in even.tensors.items()}
        tensors |= {f"odd.{name}": x for name, x in odd.tensors.items()}
        return State(tensors, {"even": dict(even.values), "odd": dict(odd.values)})

    @classmethod
    def from_state(cls, kind: type[Statistic], state: State) -> Self:
        """The inverse of `to_state`. LoadError, naming the field, on anything else."""
        return cls(*(_half(kind, state, name) for name in ("even", "odd")))


def _half(kind: type[Statistic], state: State, name: str) -> Statistic:
    values = state.values.get(name)
    if not isinstance(values, Mapping):
        raise LoadError(f"the field {name!r} does not hold the values of a half")
    tensors = {key.partition(".")[2]: x for key, x in state.tensors.items() if key.startswith(f"{name}.")}
    try:
        return kind.from_state(State(tensors, values))
    except QuantcError as error:
        error.what = f"the {name} half: {error.what}"
        raise
