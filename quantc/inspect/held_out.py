"""Held-out batches: data that calibration does not see, to measure a quantized program on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from quantc.calibration.observed_tensors import observed_tensors
from quantc.calibration.underflow import extremes_of
from quantc.errors import CalibrationError, DataError, InputError
from quantc.ir.batch_inputs import check_batches, leaves_of
from quantc.ir.finite_inputs import Watch
from quantc.ir.plan import Group
from quantc.ir.program import Program

MARGIN = 0.25
"""By how much of its width a calibrated range may be left on either side: other data of the same kind leaves it a little."""
FAR = 0.01
"""Share of an input's values beyond that margin above which the input is reported."""


@dataclass(frozen=True, slots=True)
class Outside:
    """An input much of which is far outside the calibrated range."""

    name: str
    share: float
    """Of its values: how many do."""
    calibrated: tuple[float, float]
    measured: tuple[float, float]

    def told(self, measured_on: str) -> str:
        """One-sentence message."""
        calibrated, measured = (f"{low:.3g}..{high:.3g}" for low, high in (self.calibrated, self.measured))
        return (
            f"the data measured on is not like that calibrated with: {self.share:.0%} of input {self.name} over {measured_on} "
            f"lies far outside of what calibration saw, {measured} against {calibrated}; give both the same preprocessing "
            "before looking at ops"
        )


def outside(prepared: Program, batches: Iterable[Any]) -> tuple[Outside, ...]:
    """Inputs of a calibrated program whose values in `batches` are far outside the calibrated range, farthest first."""
    ranges = {node: _range(prepared, groups) for node, groups in observed_tensors(prepared).items()}
    places = enumerate(prepared.graph.find_nodes(op="placeholder"))
    watched = {index: (node.name, found) for index, node in places if (found := ranges.get(node)) is not None}
    seen: dict[int, list[Tensor]] = {}
    for number, batch in enumerate(batches):
        leaves = leaves_of(prepared, batch, number)
        for index in watched:
            if isinstance(leaves[index], Tensor) and leaves[index].numel():
                seen.setdefault(index, []).append(leaves[index].detach().flatten())
    rows = [_outside(*watched[index], torch.cat(parts)) for index, parts in seen.items()]
    return tuple(sorted((row for row in rows if row.share > FAR), key=lambda row: -row.share))


def _range(prepared: Program, groups: Iterable[Group]) -> tuple[float, float] | None:
    """The widest of the ranges that calibration saw for a tensor."""
    found = [extremes_of(prepared.plan.statistics.get(group.name)) for group in groups]
    lows, highs = [low for low, _ in found if low is not None], [high for _, high in found if high is not None]
    return (min(lows), max(highs)) if lows and highs else None


def _outside(name: str, calibrated: tuple[float, float], values: Tensor) -> Outside:
    low, high = calibrated
    margin = MARGIN * (high - low)
    far = (values < low - margin) | (values > high + margin)
    return Outside(name, float(far.double().mean()), calibrated, (float(values.min()), float(values.max())))


def split_held_out(
    batches: Iterable[Any] | None, held_out: int | Iterable[Any] | None
) -> tuple[Iterable[Any] | None, Iterable[Any] | None]:
    """Batches to calibrate with, and batches to measure on; None for the latter if none are held out."""
    if held_out is None:
        return batches, None
    if not isinstance(held_out, int):
        check_batches(held_out)
        if isinstance(held_out, Sized) and length_hint(held_out, 1) == 0:
            raise _none_held_out()
        return batches, held_out
    if isinstance(held_out, bool) or held_out < 1:
        raise _wrong(f"held_out is {held_out!r}", "give a number of batches, or batches of their own")
    if batches is None:
        raise _wrong(f"held_out is {held_out}, and there are no batches to keep so many of", "give batches as well")
    last = Last(batches, held_out)
    return First(last), last


def sound(held_out: Iterable[Any], captured: Program) -> list[Any]:
    """Validated batches to measure on: at least one, and none with NaN or infinity."""
    found, watch = list(held_out), Watch.of(captured.graph, captured.signature)
    if not found:
        raise _none_held_out()
    for number, batch in enumerate(found):
        leaves = leaves_of(captured, batch, number)
        try:
            watch.check(leaves)
        except InputError as error:
            raise DataError(
                f"held-out batch {number}: {error.what}",
                where=f"held_out=, batch {number}, {error.where}",
                advice="correct the data: what is measured on such a batch says nothing",
            ) from error
    return found


class Last:
    """The last batches of an iterable that is consumed once, whatever its length."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self.batches, self.count = batches, count
        self._before = self._pass_on()
        self._last: deque[Any] = deque()

    def _pass_on(self) -> Iterator[Any]:
        for batch in self.batches:
            self._last.append(batch)
            if len(self._last) > self.count:
                yield self._last.popleft()

    def before(self) -> Iterator[Any]:
        """Batches that are not among the last; CalibrationError if there are none."""
        first = next(self._before, None)
        if first is None:
            raise CalibrationError(
                f"there are {len(self._last)} batches, and {self.count} are held out: none is left to calibrate with",
                where=f"held_out={self.count}",
                advice="give more batches, or hold out fewer",
            )
        yield first
        yield from self._before

    def __iter__(self) -> Iterator[Any]:
        for _ in self._before:  # without calibration they have not been consumed yet
            pass
        return iter(self._last)


class First:
    """All batches but the last."""

    def __init__(self, last: Last) -> None:
        self.last = last

    def __iter__(self) -> Iterator[Any]:
        return self.last.before()

    def __len__(self) -> int:
        return max(len(self.last.batches) - self.last.count, 0)  # type: ignore[arg-type]  # TypeError, as len() has it


def _none_held_out() -> InputError:
    return _wrong("held_out holds no batch", "give a number of batches, or batches of their own")


def _wrong(what: str, advice: str) -> InputError:
    return InputError(what, where="held_out=", advice=advice)
