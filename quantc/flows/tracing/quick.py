"""One call of those that a fused op is made of. The op runs when all its operands are there; calls before that, and those
whose work it has done already, give tensors that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from quantc.flows.tracing.call_sites import Key, Link, OpSite
from quantc.flows.tracing.traced_tensor import Traced, Waiting, become, body_of, call_on_floats, to_be_fused
from quantc.flows.tracing.units import Unit, reach

if TYPE_CHECKING:
    from quantc.flows.tracing.run import Run
    from quantc.flows.tracing.trace import Trace


NOTHING: dict[str, Any] = {}


class Quick(Link):
    """What runs instead of a module of torch.nn whose one call is part of a quantized op."""

    __slots__ = (
        "code", "follows", "has_parameters", "hooks", "instruction", "is_last", "is_near", "is_watched", "leaf",
        "may_follow", "number", "path", "pre_hooks", "site", "starts", "trace", "unit", "writes",
    )  # fmt: skip

    def __init__(self, site: OpSite, trace: Trace, key: Key, may_follow: frozenset[int]) -> None:
        super().__init__()
        self.site, self.unit, self.trace = site, trace.units[site.number], trace
        self.number = site.number
        unit = self.unit
        self.path: str = key[0]
        self.is_near = len(key) == 3
        """Whether `forward` of the module around it calls it: by this instruction of its code."""
        self.instruction: int = key[2]
        self.is_watched = site.number in trace.busy
        self.may_follow = may_follow
        """The steps that it may come after, if control flow over it is watched."""
        self.starts = site.number == unit.trigger == unit.members[0] and len(unit.operands) == 1
        self.follows = unit.is_fused and site.number > unit.trigger
        self.is_last = site.number == unit.members[-1]
        self.writes = site.number in unit.in_place
        self.leaf: Any = None

    def bind(self, leaf: Any, code: Any) -> None:
        """Hold on to the module and to the code that calls it: looking these up each time takes as long as the rest."""
        self.leaf, self.code = leaf, code
        self.hooks, self.pre_hooks = leaf._forward_hooks, leaf._forward_pre_hooks
        self.has_parameters = bool(leaf._parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """The copy of a trace makes its own."""

    def call(self, args: tuple[Any, ...], run: Run) -> Any:
        """Do the work of the module."""
        x, unit = args[0], self.unit
        if self.starts:
            output = run.queue.put_off(self.number, unit, args, unit.grids_read) if unit.reads_bytes else None
            if output is None:
                output = unit.run_quantized(self.trace.held, {0: x}, self.trace.target)
            if not self.is_last:
                output = self._waits(args, {0: x}, output)
        elif self.follows and (before := _done_before(x, unit)) is not None:
            output = before.result if self.is_last else self._waits(args, before.operands, before.result)
        else:
            output = advance(self.trace, unit, self.number, self.leaf.forward, args, NOTHING, run)
        if self.writes and type(x) is Traced and output is not x:
            become(x, output)
        return output

    def _waits(self, args: tuple[Any, ...], operands: dict[int, Any], result: Any) -> Traced:
        waiting = Waiting(self.unit, self.number, self.leaf.forward, args, NOTHING, operands, result)
        return to_be_fused(body_of(result), waiting)


def _done_before(x: Any, unit: Unit) -> Waiting | None:
    """For what an op has given within a fused one: how far that is, if it was computed."""
    waiting = x.waiting if type(x) is Traced else None
    return waiting if waiting is not None and waiting.unit is unit and waiting.result is not None else None


def advance(
    trace: Trace,
    unit: Unit,
    call: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Run,
) -> Any:
    """Any call of those that a fused op is made of."""
    if not unit.is_fused:
        return run_unit(trace, unit, run, {number: reach(args, kwargs, path) for number, path in unit.by_call[call]})
    before = _waiting_for(unit, args, kwargs)
    if call != unit.members[0] and before is None:
        return call_on_floats(func, args, kwargs)  # called on something else than when it was recorded
    operands = dict(before.operands) if before is not None else {}
    for number, path in unit.by_call.get(call, ()):
        operands[number] = reach(args, kwargs, path)
    result = before.result if before is not None else None
    if call == unit.trigger:
        if len(operands) != len(unit.operands):
            return call_on_floats(func, args, kwargs)
        result = run_unit(trace, unit, run, operands)
    if call == unit.members[-1]:
        return result if result is not None else call_on_floats(func, args, kwargs)
    waiting = Waiting(unit, call, func, args, kwargs, operands, result)
    shape = body_of(result) if result is not None else run.shape_of_result(unit, call, func, args, kwargs)
    return to_be_fused(shape, waiting)


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


def _waiting_for(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Waiting | None:
    """The part of a fused op that was done before, among the arguments of the next call."""
    found: Waiting | None = None
    for x in (*args, *kwargs.values()):
        if type(x) is Traced and x.waiting is not None and x.waiting.unit is unit:
            if found is None:
                found = x.waiting
            else:  # two branches of one op
                found.operands.update(x.waiting.operands)
    return found
