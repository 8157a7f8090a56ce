"""Transactional accumulation of statistics: a batch counts once all of it has been seen."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from quantc.calibration.interpreter import Runner, Watch
from quantc.calibration.observed_tensors import data_groups, observed_tensors
from quantc.errors import DataError
from quantc.ir.program import Program
from quantc.ir.types import dtype_of
from quantc.observe.auto import Auto
from quantc.observe.observation_registry import OBSERVATIONS
from quantc.spec.halves import Halves
from quantc.spec.observation import Observation, Order
from quantc.spec.spec import QuantSpec

ADVICE = "look for the op that makes them and correct the model or the data"
MASK = (
    "if this is a mask of minus infinity, leave the op that reads it float: QuantConfig().set_node({reader!r}, FLOAT)"
)


class NotFiniteError(DataError):
    """NaN or infinity in an observed tensor."""

    def __init__(self, node: fx.Node, where: str, count: int, of: int) -> None:
        reader = next((user.name for user in node.users if _computes(user)), None)
        super().__init__(
            f"{count} of {of} values are NaN or infinite",
            where=where,
            advice=ADVICE if reader is None else f"{ADVICE}; {MASK.format(reader=reader)}",
        )
        self.node = node


def _computes(node: fx.Node) -> bool:
    """True if a node yields numbers that could be quantized, rather than a size."""
    dtype = dtype_of(node)
    return node.op.startswith("call_") and dtype is not None and dtype.is_floating_point


@dataclass(frozen=True)
class Whole:
    """Statistics after a number of whole batches."""

    totals: Mapping[str, Observation]
    """The statistics, by group."""
    batches: int = 0
    samples: int | None = 0
    """None once a batch did not say how many it holds."""
    collected: Mapping[str, Halves] = field(default_factory=dict)
    """Statistics for passes that fit weights, by name and tensor."""


class Seat:
    """Observation of one group within the running batch."""

    __slots__ = ("empty", "part")

    def __init__(self, spec: QuantSpec) -> None:
        kind = OBSERVATIONS[spec.observe.name]
        self.empty = partial(kind.empty, spec.granularity, dict(spec.observe.options))
        self.part = self.empty()

    def begin(self, total: Observation, batch: int = 0) -> None:
        # an order-dependent observation cannot be merged, so a copy of it continues
        self.part = self.empty() if total.order is Order.FREE else copy.deepcopy(total)
        if isinstance(self.part, Auto):
            self.part.batch = batch

    def added_to(self, total: Observation) -> Observation:
        """The statistics with this batch added. `total` is not modified."""
        if total.order is not Order.FREE:
            return self.part
        return total.merge(self.part) if self.part.seen else total


class Tally:
    """Statistics of the groups of a prepared program: all of them, or some by name."""

    def __init__(self, program: Program, totals: Mapping[str, Observation], only: Container[str] | None = None) -> None:
        self.program = program
        self.seats = {
            group.name: Seat(spec) for group, spec in data_groups(program) if only is None or group.name in only
        }
        self.whole = Whole(
            {name: totals[name] if name in totals else seat.empty() for name, seat in self.seats.items()}
        )

    def begin(self, batch: int = 0) -> None:
        """Start a batch, by its number in all calibrations. Partial observations of an earlier one are dropped."""
        for name, seat in self.seats.items():
            seat.begin(self.whole.totals[name], batch)

    def commit(self, samples: int | None) -> None:
        """Commit the batch: all of it at once, so that no interruption can come in between."""
        before = self.whole
        totals = {name: seat.added_to(before.totals[name]) for name, seat in self.seats.items()}
        count = None if samples is None or before.samples is None else before.samples + samples
        self.whole = Whole(totals, before.batches + 1, count, before.collected)

    def watchers(self) -> dict[fx.Node, Watch]:
        """Watch callbacks by node, for the runner."""
        return {
            node: self._watch(node, seats)
            for node, groups in observed_tensors(self.program).items()
            if (seats := [self.seats[group.name] for group in groups if group.name in self.seats])
        }

    def _watch(self, node: fx.Node, seats: list[Seat]) -> Watch:
        where = self.program.describe(node)

        def watch(value: Any) -> None:
            for seat in seats:
                part = seat.part
                before = part.non_finite
                part.update(value, where=where)
                if part.non_finite > before:
                    raise NotFiniteError(node, where, part.non_finite - before, value.numel())

        return watch


class FirstNotFinite:
    """Finds the first op of a program that yields NaN or infinity."""

    def __init__(self, program: Program) -> None:
        looking = (node for node in program.nodes() if node.op not in ("get_attr", "output"))
        self.runner = Runner(program, {node: self._watch(node) for node in looking})

    def run(self, leaves: list[Any]) -> fx.Node | None:
        try:
            self.runner.run(leaves)
        except NotFiniteError as error:
            return error.node
        return None

    def _watch(self, node: fx.Node) -> Watch:
        def watch(value: Any) -> None:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return
            if not bool(torch.isfinite(value).all()):
                raise NotFiniteError(node, "", 1, value.numel())

        return watch
