"""Qparams found by training, or fitted to the data, in place of statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError, ObservationError, SpecError
from quantc.observe.minmax import MinMax
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.observation import Order, State, check_spec
from quantc.spec.spec import Option, QuantSpec


@dataclass(eq=False, slots=True)
class Trained:
    """The final qparams of a fake quantizer, or of a pass that fits weights. It can be neither requested nor updated."""

    statistics: ClassVar[str] = "trained"
    order: ClassVar[Order] = Order.MATTERS

    share: Share
    found: QParams
    seen: int = 1
    non_finite: int = 0

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        raise SpecError(
            "trained scales come from training and qc.recover alone", advice="prepare with qat=True, train, and convert"
        )

    def update(self, x: Tensor, *, where: str = "") -> None:
        raise _fixed(where)

    def merge(self, other: Self) -> Self:
        raise _fixed("")

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        check_spec(self, spec, where)
        return self.found

    def to_state(self) -> State:
        return State({"scale": self.found.scale, "zero_point": self.found.zero_point})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        scale = state.tensor("scale", torch.float32)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise LoadError("the tensor 'scale' holds something else than positive numbers")
        return cls(share, QParams(scale, state.tensor("zero_point", torch.int64, scale.shape)))


def _fixed(where: str) -> ObservationError:
    return ObservationError(
        "scales that training or qc.recover has found do not change with data",
        where=where or None,
        advice="train further, or prepare without qat=True and calibrate",
    )


class Lsq(MinMax):
    """Scales learned by gradient (LSQ). They are initialized when training begins; there is nothing to collect."""

    statistics: ClassVar[str] = "lsq"


class LsqPlus(MinMax):
    """Scales and zero points learned by gradient (LSQ+)."""

    statistics: ClassVar[str] = "lsq-plus"


LEARNED = (Lsq.statistics, LsqPlus.statistics)
"""The choices of `observe` that need training."""
