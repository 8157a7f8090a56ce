"""Batches that calibration does not see: what a quantized program is measured on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from quantc.errors import CalibrationError, InputError
from quantc.feeding import check_batches


def parted(
    batches: Iterable[Any] | None, held_out: int | Iterable[Any] | None
) -> tuple[Iterable[Any] | None, Iterable[Any] | None]:
    """The batches to calibrate with, and those to measure on; None for the latter where none are held out."""
    if held_out is None:
        return batches, None
    if not isinstance(held_out, int):
        check_batches(held_out)
        return batches, held_out
    if isinstance(held_out, bool) or held_out < 1:
        raise _wrong(f"held_out is {held_out!r}", "give a number of batches, or batches of their own")
    if batches is None:
        raise _wrong(f"held_out is {held_out}, and there are no batches to keep so many of", "give batches as well")
    last = Last(batches, held_out)
    return First(last), last


class Last:
    """The last batches of an iterable that is gone through once, whatever its length."""

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
        """Those that are not among the last; CalibrationError if there are none."""
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
        for _ in self._before:  # where nothing was calibrated, nobody has gone through them
            pass
        return iter(self._last)


class First:
    """All but the last."""

    def __init__(self, last: Last) -> None:
        self.last = last

    def __iter__(self) -> Iterator[Any]:
        return self.last.before()

    def __len__(self) -> int:
        return max(len(self.last.batches) - self.last.count, 0)  # type: ignore[arg-type]  # TypeError, as len() has it


def _wrong(what: str, advice: str) -> InputError:
    return InputError(what, where="held_out=", advice=advice)
