"""The protocol of observations: mergeable statistics of a tensor, from which qparams are derived.

Any class with these members serves; no base class is needed. Observations whose `order` is FREE form a monoid: an empty
one is the identity, and batches may come in any order, from any number of processes, with the same bits at the end.
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
    """Dependence of the result on the order of the data."""

    FREE = "any order and any split of the data gives the same bits"
    MATTERS = "the data must come in one order, in one process"


@dataclass(frozen=True)
class State:
    """The contents of an observation, ready to be saved: tensors, and JSON values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def tensor(self, name: str, dtype: torch.dtype, shape: torch.Size | None = None) -> Tensor:
        """A tensor by name. LoadError, naming it, if it is missing or has another dtype or shape."""
        found = self.tensors.get(name)
        if found is None:
            raise LoadError(f"the tensor {name!r} is missing")
        if found.dtype != dtype or (shape is not None and found.shape != shape):
            expected = f"{dtype}{list(shape) if shape is not None else ''}"
            raise LoadError(f"the tensor {name!r} is {found.dtype}{list(found.shape)}, not {expected}")
        return found

    def count(self, name: str) -> int:
        """A non-negative integer by name."""
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
    """The name of the statistics, in the registry and in saved files."""
    order: ClassVar[Order]

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        """An observation without data. `options` are those of the spec's `observe`; unknown ones are a SpecError."""
        ...

    @property
    def share(self) -> Share:
        """The granularity of the statistics."""
        ...

    @property
    def seen(self) -> int:
        """The number of elements observed."""
        ...

    @property
    def non_finite(self) -> int:
        """The number of them that were NaN or infinite."""
        ...

    def update(self, x: Tensor, *, where: str = "") -> None:
        """Add a tensor."""
        ...

    def merge(self, other: Self) -> Self:
        """The observation of both data sets together. Neither operand is changed."""
        ...

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        """Qparams for a spec. DataError if there was NaN; ObservationError without data."""
        ...

    def to_state(self) -> State: ...

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        """The inverse of `to_state`. LoadError, naming the field, on anything else."""
        ...


def no_options(name: str, options: Mapping[str, Option]) -> None:
    """Raise SpecError if options are given to an observation that has none."""
    if options:
        raise SpecError(f"the observation {name} has no option {next(iter(options))!r}", advice="leave it out")


def refuse_empty(observation: Observation, where: str) -> None:
    """Raise DataError if non-finite values were observed, ObservationError if nothing was: there are no qparams."""
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
    """Raise ObservationError unless two observations have one type and one granularity."""
    if type(left) is not type(right) or left.share != right.share:
        raise ObservationError(
            f"{left.statistics} {left.share} cannot be merged with {right.statistics} {right.share}",
            advice="merge statistics that were collected with the same spec",
        )


def check_spec(observation: Observation, spec: QuantSpec, where: str) -> None:
    """Raise ObservationError unless the statistics have the granularity of the spec."""
    if observation.share != spec.granularity:
        raise ObservationError(
            f"statistics {observation.share} were collected, and the spec asks for {spec.granularity}",
            where=where or None,
            advice="calibrate with this granularity",
        )
