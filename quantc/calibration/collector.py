"""Collects statistics of what layers read, while a calibration runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from quantc.calibration.accumulator import NotFiniteError
from quantc.calibration.collect import Collection, Tap, share_of
from quantc.calibration.gradients import Gradients
from quantc.calibration.interpreter import Watch
from quantc.calibration.layer_inputs import LayerInput
from quantc.ir.program import Program
from quantc.spec.halves import Halves

ENOUGH = 2**17
"""Numbers of a batch that are taken for moments alone: those of more rows differ by less than those of other batches."""
FEWEST, MOST = 32, 512
"""Rows of them."""


class Collector:
    """The statistics of one calibration. Those of a batch are held until all of it has been seen, and then added: as rows,
    or as statistics of them where these are smaller."""

    def __init__(self, program: Program, collection: Collection | None, first: int) -> None:
        self.program = program
        self.taps = collection.taps if collection is not None else ()
        self.effort = collection.effort if collection is not None else 1.0
        self.first = first
        """The number of batches in the plan before: halves go by the number of the batch in all calibrations."""
        self.totals: dict[str, Halves] = {tap.name: Halves.empty(tap.kind, tap.options) for tap in self.taps}
        self.is_torn = False
        """True while a batch is being added and counted, and for good if that was interrupted."""
        self._batch = 0
        self._held: list[tuple[Tap, Tensor | Halves]] = []

    def begin(self, batch: int) -> None:
        """Start a batch, by its number in this calibration."""
        self._batch = self.first + batch
        self._held = []

    def hold(self, tap: Tap, rows: Tensor) -> None:
        """Keep rows of the running batch. NotFiniteError if they hold NaN or infinity."""
        if rows.is_floating_point() and not bool(torch.isfinite(rows).all()):
            bad = int((~torch.isfinite(rows)).sum())
            raise NotFiniteError(tap.value, self.program.describe(tap.value), bad, rows.numel())
        if rows.nbytes <= tap.bytes // 2:
            self._held.append((tap, rows))
            return
        part = Halves.empty(tap.kind, tap.options)
        part.update(rows, batch=self._batch, where=self.program.describe(tap.value))
        self._held.append((tap, part))

    def hold_all(self, found: Iterable[tuple[Tap, Tensor]]) -> None:
        for tap, rows in found:
            self.hold(tap, rows)

    def commit(self) -> None:
        """Add the batch, and leave `is_torn` set until its caller has counted it. Rows are added in place: a second set of
        large statistics would not fit where the first just does."""
        self.is_torn = bool(self._held)
        while self._held:
            tap, part = self._held.pop(0)
            if isinstance(part, Halves):
                self.totals[tap.name] = self.totals[tap.name].merge(part)
            else:
                self.totals[tap.name].update(part, batch=self._batch, where=self.program.describe(tap.value))

    def watchers(self) -> dict[fx.Node, list[Watch]]:
        """Watch callbacks by node, for the runner. Statistics of the same rows share them."""
        found: dict[fx.Node, list[Watch]] = {}
        sharing: dict[LayerInput, list[Tap]] = {}
        for tap in self.taps:
            if tap.rows is not None:
                sharing.setdefault(tap.rows, []).append(tap)
            elif tap.kind.statistics != "fisher":
                found.setdefault(tap.value, []).append(partial(self._watch_whole, tap))
        for rows, taps in sharing.items():
            found.setdefault(rows.value, []).append(partial(self._watch_rows, rows, taps))
        return found

    def _watch_whole(self, tap: Tap, value: Any) -> None:
        if not value.numel():
            return
        self.hold(tap, value.reshape(1, -1, 1).clone() if tap.axis is None else _ends(value, tap.axis))

    def _watch_rows(self, rows: LayerInput, taps: list[Tap], value: Any) -> None:
        kinds = {tap.kind.statistics for tap in taps}
        share = share_of(rows, self.effort) if "gram" in kinds else 1.0
        most = min(MOST, max(FEWEST, ENOUGH // (rows.groups * rows.width))) if kinds == {"moments"} else None
        found = rows.rows(value, self._batch, share, most)
        for tap in taps:
            self.hold(tap, found)


def _ends(value: Tensor, axis: int) -> Tensor:
    """The smallest and the largest value of each channel, as two rows: all that its range takes."""
    value = value.detach().float()
    others = [other for other in range(value.dim()) if other != axis % value.dim()]
    ends = [value.amin(others), value.amax(others)] if others else [value, value]
    return torch.stack(ends).unsqueeze(0)


def watching(one: Mapping[fx.Node, Watch], more: Mapping[fx.Node, list[Watch]]) -> dict[fx.Node, Watch]:
    """Watch callbacks of two watchers; those of the first come first."""
    found = dict(one)
    for node, watches in more.items():
        every = [*([one[node]] if node in one else []), *watches]
        found[node] = every[0] if len(every) == 1 else partial(_tell_all, every)
    return found


def _tell_all(watches: Sequence[Watch], value: Any) -> None:
    for watch in watches:
        watch(value)


def gradients_of(program: Program, taps: Sequence[Tap]) -> Gradients | None:
    """The backward pass that some statistics take, if any do."""
    wanted = [tap for tap in taps if tap.kind.statistics == "fisher"]
    return Gradients(program, wanted) if wanted else None
