"""What an observation is: statistics of a tensor that can be merged, and from which qparams are derived.

Anything with these members serves; nothing need be derived from. Those whose `order` is FREE form a monoid: an
empty one changes nothing, and batches may come in any order, from any number of processes, with the same bits at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.spec import Option, QuantSpec


class Order(Enum):
    """Whether the order of the data matters."""

    FREE = "any order and any split of the data gives the same bits"
    MATTERS = "the data must come in one order, in one process"


@dataclass(frozen=True)
class State:
    """The contents of an observation, ready to be saved: tensors, and values that JSON can hold."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def tensor(self, name: str, dtype: torch.dtype, shape: torch.Size | None = None) -> Tensor:
        """A tensor by name. LoadError, naming it, if it is missing or of another kind."""
        found = self.tensors.get(name)
        if found is None:
            raise LoadError(f"the tensor {name!r} is missing")
        if found.dtype != dtype or (shape is not None and found.shape != shape):
            expected = f"{dtype}{list(shape) if shape is not None else ''}"
            raise LoadError(f"the tensor {name!r} is {found.dtype}{list(found.shape)}, not {expected}")
        return found

    def count(self, name: str) -> int:
        """A whole number, not negative, by name."""
        found = self.values.get(name)
        if type(found) is not int or found < 0:
            raise LoadError(f"the field {name!r} is {found!r}, not a count")
        return found

    def number(self, name: str) -> float:
        found = self.values.get(name)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise LoadError(f"the field {name!r} is {found!r}, not a number")
        return float(found)


@runtime_checkable
class Observation(Protocol):
    """Mergeable statistics of one tensor of a program."""

    statistics: ClassVar[str]
    """The name of what is collected: that of the registry, and of saved files."""
    order: ClassVar[Order]

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        """One that has seen nothing. `options` are those of the spec's `observe`; unknown ones are a SpecError."""
        ...

    @property
    def share(self) -> Share:
        """Which elements share a range."""
        ...

    @property
    def seen(self) -> int:
        """How many elements it has seen."""
        ...

    @property
    def non_finite(self) -> int:
        """How many of them were NaN or infinite."""
        ...

    def update(self, x: Tensor, *, where: str = "") -> None:
        """Take in a tensor."""
        ...

    def merge(self, other: Self) -> Self:
        """What one that saw the data of both would be. Neither is changed."""
        ...

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        """Scale and zero point for a spec. DataError if there was NaN; ObservationError if nothing was seen."""
        ...

    def to_state(self) -> State: ...

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        """What `to_state` wrote. LoadError, naming the field, on anything else."""
        ...


def no_options(name: str, options: Mapping[str, Option]) -> None:
    """Refuse options where there are none."""
    if options:
        raise SpecError(f"the observation {name} has no option {next(iter(options))!r}", advice="leave it out")


def refuse_empty(observation: Observation, where: str) -> None:
    """An observation that has seen nothing, or NaN, gives no qparams."""
    if observation.non_finite:
        raise DataError(
            f"{observation.non_finite} of {observation.seen} observed values are NaN or infinite",
            where=where or None,
            advice="look for the op that makes them, correct the model or the data, and calibrate again",
        )
    if not observation.seen:
        raise ObservationError(
            "nothing was observed here",
            where=where or None,
            advice="calibrate with at least one batch that reaches this op",
        )


def check_mergeable(left: Observation, right: Observation) -> None:
    """Only statistics of one kind, over one sharing, can be merged."""
    if type(left) is not type(right) or left.share != right.share:
        raise ObservationError(
            f"{left.statistics} {left.share} cannot be merged with {right.statistics} {right.share}",
            advice="merge statistics that were collected with the same spec",
        )


def check_spec(observation: Observation, spec: QuantSpec, where: str) -> None:
    """Statistics per channel give no qparams per group."""
    if observation.share != spec.granularity:
        raise ObservationError(
            f"statistics {observation.share} were collected, and the spec asks for {spec.granularity}",
            where=where or None,
            advice="calibrate with this granularity",
        )
