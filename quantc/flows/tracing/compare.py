"""The numeric suite of the tracing flow: a prepared model beside the converted one, call by call."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from quantc.capture.runtime.call_tracing import tensors_in
from quantc.errors import DataError, InputError
from quantc.flows.tracing.call_sites import OpSite
from quantc.flows.tracing.copies import copy_model
from quantc.flows.tracing.run import ACTIVE
from quantc.flows.tracing.trace import Phase
from quantc.flows.tracing.traced_tensor import floats_of
from quantc.flows.tracing.verbs import examples_in, state_of
from quantc.support.sqnr import Noise, as_data, format_sqnr


@dataclass(frozen=True, slots=True)
class Logged:
    """The results of one call."""

    site: OpSite
    module: str
    tensors: list[torch.Tensor]


class Total:
    """All calls from one place."""

    def __init__(self, first: Logged) -> None:
        self.site, self.module = first.site, first.module
        self.noise, self.calls = Noise(), 0


@dataclass(frozen=True, slots=True)
class CallRow:
    """A call site that is quantized, or part of a quantized op. SQNR is in dB: infinite where both models agree to the last bit."""

    op: str
    module: str
    """The path of the module that calls it."""
    source: str
    calls: int
    """The number of calls over all batches."""
    sqnr: float
    """Of its result in the converted model, with the error of everything before it."""

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "sqnr": as_data(self.sqnr)}


@dataclass(frozen=True, slots=True)
class CallComparison:
    """A converted model against the prepared one. Prints as a table in the order of the calls."""

    model: str
    batches: int
    sqnr: float
    """Of all results together, in dB."""
    rows: tuple[CallRow, ...]
    notes: tuple[str, ...] = ()

    def worst(self, count: int | None = None) -> tuple[CallRow, ...]:
        """The calls that end up farthest from the float model, the farthest first."""
        return tuple(sorted(self.rows, key=lambda row: row.sqnr)[:count])

    def to_data(self) -> dict[str, Any]:
        rows = [row.to_data() for row in self.rows]
        return {
            "model": self.model, "batches": self.batches, "sqnr": as_data(self.sqnr), "rows": rows, "notes": list(self.notes),
        }  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        from quantc.support.terminal import plain_rows

        unit = " dB" if math.isfinite(self.sqnr) else ""
        lines = [f"{self.model}: SQNR {format_sqnr(self.sqnr)}{unit} over {self.batches} batches"]
        heads = ("op", "module", "source", "calls", "SQNR, dB")
        cells = [
            (
                row.op,
                row.module,
                row.source,
                str(row.calls),
                format_sqnr(row.sqnr),
            )
            for row in self.rows
        ]
        return "\n".join([*lines, *plain_rows(heads, cells), *(f"note: {note}" for note in self.notes)])


def compare(prepared: nn.Module, converted: nn.Module, batches: Iterable[Any]) -> CallComparison:
    """Run a prepared model and its converted form on batches; compare them call by call.

    A batch has the form of an example of `prepare`. Both run as copies: neither statistics nor buffers change. Where the two
    take different paths, because the model branches on numbers, a batch counts up to there, and a note says so.
    """
    reference, quantized = copy_model(prepared), copy_model(converted)
    states = state_of(reference), state_of(quantized)
    if states[0].trace.phase is Phase.CONVERTED or states[1].trace.phase is not Phase.CONVERTED:
        raise InputError(
            "compare takes a prepared model and the converted one",
            where=f"the first is {states[0].trace.phase.value}, the second {states[1].trace.phase.value}",
            advice="compare(prepared, convert(prepared), batches)",
        )
    if states[0].trace.phase is Phase.OBSERVING and states[0].trace.made_of != states[1].trace.made_of:
        raise InputError(
            "the converted model has other weights than the prepared one",
            where=type(prepared).__name__,
            advice="compare(prepared, convert(prepared), batches)",
        )
    reference.eval()
    totals: dict[int, Total] = {}
    whole, count, parted = Noise(), 0, 0
    if isinstance(batches, torch.Tensor):
        raise InputError("batches is a tensor", where="compare", advice="give a list of batches: [x]")
    for batch in batches:
        (args, kwargs), count = examples_in([batch])[0], count + 1
        with torch.random.fork_rng(devices=[]):  # both draw the same numbers
            expected, result = _log_calls(reference, args, kwargs)
        found, other = _log_calls(quantized, args, kwargs)
        whole.add(tensors_in(result), tensors_in(other))
        parted += not _add(totals, expected, found)
    if not count:
        raise DataError("no batches", where="compare", advice="give at least one")
    rows = [
        CallRow(row.site.name, row.module, row.site.where, row.calls, row.noise.sqnr)
        for number, row in sorted(totals.items())
    ]
    notes = (f"in {parted} batches the models took different ways: compared up to there",) if parted else ()
    return CallComparison(type(prepared).__name__, count, whole.sqnr, tuple(rows), notes)


def _log_calls(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Logged], Any]:
    """The result of each quantized call of a model, and of the model. The arguments are copied, since the model may write to them."""
    made: list[Logged] = []
    units = state_of(model).trace.units

    def log(site: OpSite, module: str, output: Any) -> None:
        if site.number in units:  # others are not intercepted once a model is converted
            made.append(Logged(site, module, [floats_of(x).clone() for x in tensors_in(output)]))

    args, kwargs = copy.deepcopy((args, kwargs))
    ACTIVE.log = log
    try:
        with torch.no_grad():
            return made, model(*args, **kwargs)
    finally:
        ACTIVE.log = None


def _add(totals: dict[int, Total], expected: list[Logged], found: list[Logged]) -> bool:
    """Add what calls give, as long as both models make the same. False if they part."""
    for reference, value in zip(expected, found, strict=False):
        if reference.site.number != value.site.number:
            return False
        total = totals.setdefault(value.site.number, Total(value))
        total.noise.add(reference.tensors, value.tensors)
        total.calls += 1
    return len(expected) == len(found)


__all__ = ["CallComparison", "CallRow", "compare"]
