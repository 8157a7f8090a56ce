"""One call of those that a fused op is made of. The op runs when all its operands are there; calls before that, and those
whose work it has done already, give tensors that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from quantc.flows.tracing.call_sites import Key, OpSite
from quantc.flows.tracing.traced_tensor import (
    Done,
    Kept,
    Light,
    Traced,
    Waiting,
    become,
    call_on_floats,
    current,
    floats_of,
    kept,
    to_be_fused,
    twin,
    written,
)
from quantc.flows.tracing.units import Unit, reach

if TYPE_CHECKING:
    from quantc.flows.tracing.run import Run
    from quantc.flows.tracing.trace import Trace


NONE: dict[str, Any] = {}
"""No keywords."""


class Quick:
    """What runs instead of a module of torch.nn whose one call is part of a quantized op."""

    __slots__ = (
        "bit", "follows", "is_first", "is_last", "leads", "leaf", "number", "operand", "path", "site", "starts", "trace", "unit",
        "writes",
    )  # fmt: skip

    def __init__(self, site: OpSite, trace: Trace, key: Key) -> None:
        self.site, self.unit, self.trace = site, trace.units[site.number], trace
        self.number = site.number
        unit = self.unit
        self.path: str = key[0]
        self.starts = site.number == unit.trigger == unit.members[0] and len(unit.operands) == 1
        own = [number for number, _ in unit.by_call.get(site.number, ())]
        self.is_first = site.number == unit.members[0] and len(own) == 1
        self.leads = site.number < unit.trigger and (self.is_first or (not own and site.number != unit.members[0]))
        """Whether it comes before the last operand is there, and takes no operand but the first of all."""
        self.operand = own[0] if own else -1
        self.follows = unit.is_fused and site.number > unit.trigger
        self.is_last = site.number == unit.members[-1]
        self.writes = site.number in unit.in_place
        self.bit = unit.bits[site.number]
        self.leaf: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """The copy of a trace makes its own."""

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        """Do the work of the module."""
        if type(args[0]) is Light:
            current(args[0])
        output = self.follow(args[0]) if self.follows else None
        return self.call(args, run) if output is None else output

    def call(self, args: tuple[Any, ...], run: Run) -> Any:
        """Do the work of the module where it is more than to wait for an op that has run."""
        x, unit = args[0], self.unit
        if type(x) is Traced and x.plain is not None:
            current(x)
        if self.starts:
            if unit.rounds_first and unit.reads_bytes:  # once, whoever reads it
                x = run.queue.on_its_grid(x, unit.grids[0])
                args = (x,)
            output = run.queue.put_off(self.number, unit, args, unit.grids_read) if unit.reads_bytes else None
            if output is None:
                output = unit.run_quantized(self.trace.held, {0: x}, self.trace.target)
            if not self.is_last:
                output = self._waits(x, {0: x}, Done(output), self.bit)
        elif self.leads and type(x) is Traced and x.plain is None:
            output = self._leads(x, args, run)
        else:
            output = None
        if output is None:
            return advance(self.trace, unit, self.number, self.leaf.forward, args, NONE, run)
        return written(x, output) if self.writes else output

    def follow(self, x: Any) -> Any:
        """Do the work of a module whose op has run: nothing, in most cases. None if there is more to it."""
        if type(x) is not Traced or x.plain is not None or (self.writes and x.shared is not None):
            return None
        unit, before = self.unit, x.waiting
        if before is None or before.unit is not unit or before.result is None:
            return None
        done = before.done | self.bit
        if not self.is_last:
            output = self._waits(x, before.operands, before.result, done)
        elif done == unit.all_bits:
            output = before.result.take()
        else:
            return None
        if self.writes:
            become(x, output)
            return x
        return output

    def _leads(self, x: Traced, args: tuple[Any, ...], run: Run) -> Traced | None:
        """A call that comes before the last operand is there: what it is given is kept until then."""
        unit, waiting = self.unit, x.waiting
        if self.is_first:
            now = kept(x)
            operands: dict[int, Any] = {self.operand: now}
            done = self.bit
        elif waiting is not None and waiting.unit is unit and waiting.result is None:
            now, operands, done = Kept(x), waiting.operands, waiting.done | self.bit
        else:
            return None
        shape = run.shape_of_result(unit, self.number, self.leaf.forward, args, NONE)
        return to_be_fused(shape, Waiting(unit, self.number, self.leaf.forward, (now,), NONE, operands, None, done))

    def _waits(self, x: Any, operands: dict[int, Any], result: Done | None, done: int) -> Traced:
        given = Kept(x) if type(x) is Traced and x.plain is None else self.unit.kept(0, x)
        waiting = Waiting(self.unit, self.number, self.leaf.forward, (given,), NONE, operands, result, done)
        return to_be_fused(result.body, waiting)  # type: ignore[union-attr]


def advance(
    trace: Trace,
    unit: Unit,
    call: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Run,
) -> Any:
    """Any call of those that a fused op is made of. What it writes to in place it gives back."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Traced):
            current(x)
    given, is_written = args, call in unit.in_place
    if is_written and trace.held.is_live:
        args = run.read_before_written(args)
    if not unit.is_fused:
        output = run_unit(trace, unit, run, {number: reach(args, kwargs, path) for number, path in unit.by_call[call]})
    else:
        output = _step(trace, unit, call, func, args, kwargs, run)
    if not is_written:
        return output
    if type(given[0]) is Traced:
        return written(given[0], output)
    return _written_to_memory(func, given, kwargs, output)


def _step(
    trace: Trace,
    unit: Unit,
    call: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Run,
) -> Any:
    before = _waiting_for(unit, args, kwargs)
    if call != unit.members[0] and not before:
        return _by_itself(unit, call, func, args, kwargs)  # called on something else than when it was recorded
    operands = {number: x for row in before for number, x in row.operands.items()}
    for number, path in unit.by_call.get(call, ()):
        x = reach(args, kwargs, path)
        operands[number] = x if call == unit.trigger else unit.operand_kept(trace, number, x, run.rounded)
    result = next((row.result for row in before if row.result is not None), None)
    done = unit.bits[call]
    for row in before:
        done |= row.done
    if call == unit.trigger:
        if len(operands) != len(unit.operands):
            return _by_itself(unit, call, func, args, kwargs)
        result = Done(run_unit(trace, unit, run, operands))
    if call == unit.members[-1]:
        output = result.take() if result is not None and done == unit.all_bits else None
        return _by_itself(unit, call, func, args, kwargs) if output is None else output
    shape = run.shape_of_result(unit, call, func, args, kwargs) if result is None else result.body
    given = tuple(kept(x) for x in args)
    waiting = Waiting(unit, call, func, given, {name: kept(x) for name, x in kwargs.items()}, operands, result, done)
    return to_be_fused(shape, waiting)


def _by_itself(unit: Unit, call: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function itself, on a copy of what it writes to: that is seen to later."""
    if call in unit.in_place:
        args = (twin(args[0]) if type(args[0]) is Traced else args[0].clone(), *args[1:])
        return floats_of(call_on_floats(func, args, kwargs))
    return call_on_floats(func, args, kwargs)


def _written_to_memory(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """An op has computed what is to be written to a tensor that is floats in the user's memory."""
    x = args[0]
    if type(output) is not Traced:
        return written(x, output)
    if output.waiting is None:
        written(x, output)
    else:
        call_on_floats(func, args, kwargs)
    if not x.is_inference():
        output.plain, output.version = x, x._version
        return output
    return x


def run_unit(trace: Trace, unit: Unit, run: Run, operands: dict[int, Any]) -> Any:
    """Compute a fused op, as far as the model has come: in float, as it is trained, or on a kernel."""
    if trace.is_converted:
        if unit.reads_bytes and run.queue is not None:
            given = [operands[number] for number in unit.reading]
            made = run.queue.put_off(unit.trigger, unit, given, unit.grids_read)
            if made is not None:
                return made
        return unit.run_quantized(trace.held, operands, trace.target)
    if trace.held.is_live:
        with torch._C.DisableTorchFunctionSubclass():
            return unit.run_trained(trace.held, operands, run.rounded)
    with torch._C.DisableTorchFunctionSubclass():
        return unit.run_float(trace.held, operands)


def _waiting_for(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Waiting]:
    """The parts of a fused op that were done before, among the arguments of the next call."""
    given = (x.waiting for x in (*args, *kwargs.values()) if type(x) is Traced)
    return [waiting for waiting in given if waiting is not None and waiting.unit is unit]
