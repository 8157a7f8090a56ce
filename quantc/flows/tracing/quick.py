"""One call of those that a fused op is made of. The op runs when all its operands are there; calls before that, and those
whose work it has done already, give tensors that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from quantc.flows.tracing.call_sites import Key, Link, OpSite
from quantc.flows.tracing.traced_tensor import (
    Done,
    Kept,
    Traced,
    Waiting,
    become,
    call_on_floats,
    current,
    floats_of,
    kept,
    levels_on,
    on_grid,
    to_be_fused,
    twin,
    written,
)
from quantc.flows.tracing.units import Unit, reach

if TYPE_CHECKING:
    from quantc.flows.tracing.run import Frame, Run
    from quantc.flows.tracing.trace import Trace


NOTHING: dict[str, Any] = {}


class Quick(Link):
    """What runs instead of a module of torch.nn whose one call is part of a quantized op."""

    __slots__ = (
        "bit", "code", "follows", "has_parameters", "hooks", "instruction", "is_first", "is_last", "is_near", "is_watched",
        "leads", "leaf", "may_follow", "number", "operand", "path", "pre_hooks", "site", "starts", "trace", "unit", "writes",
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
        if type(x) is Traced and x.plain is not None:
            current(x)
        if self.starts:
            if unit.rounds_first and unit.reads_bytes and type(x) is not Traced:  # once, whoever reads it
                x = on_grid(levels_on(x, unit.grids[0]), unit.grids[0])  # type: ignore[arg-type]
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
            return advance(self.trace, unit, self.number, self.leaf.forward, args, NOTHING, run)
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
        elif done == unit.all_bits and before.result.stamp is None:
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
        shape = run.shape_of_result(unit, self.number, self.leaf.forward, args, NOTHING)
        return to_be_fused(shape, Waiting(unit, self.number, self.leaf.forward, (now,), NOTHING, operands, None, done))

    def _waits(self, x: Any, operands: dict[int, Any], result: Done | None, done: int) -> Traced:
        given = Kept(x) if type(x) is Traced and x.plain is None else self.unit.kept(0, x)
        waiting = Waiting(self.unit, self.number, self.leaf.forward, (given,), NOTHING, operands, result, done)
        return to_be_fused(result.body, waiting)  # type: ignore[union-attr]


class QuickJoin(Link):
    """What runs instead of a function of two tensors, of which one is what a fused op has come to so far and the other its last
    operand: a sum, most of the time."""

    __slots__ = ("bit", "code", "func", "instruction", "is_last", "is_watched", "last", "may_follow", "number", "operand", "place", "unit", "writes")  # fmt: skip

    def __init__(self, func: Any, number: int, unit: Unit, frame: Frame, caller: Any) -> None:
        super().__init__()
        self.func, self.number, self.unit, self.last = func, number, unit, frame.last
        steps = frame.context.steps if frame.context is not None else {}
        self.may_follow = frozenset(step for step, after in steps.items() if number in after)
        self.is_watched = number in frame.state.trace.busy
        self.code, self.instruction = caller.f_code, caller.f_lasti
        (self.operand, path), *_ = unit.by_call[number]
        self.place: int = path[1]
        self.bit = unit.bits[number]
        self.is_last = number == unit.members[-1]
        self.writes = number in unit.in_place

    @staticmethod
    def fits(unit: Unit | None, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: Any) -> bool:
        """Whether a call is one that this can run instead of."""
        if unit is None or not unit.is_fused or number != unit.trigger or len(args) != 2 or kwargs or fixed:
            return False
        rows = unit.by_call[number]
        return len(rows) == 1 and rows[0][1] in ((0, 0), (0, 1)) and not unit.constants_of(number)

    def call(self, args: tuple[Any, ...], run: Run) -> Any:
        """Do the work of the function; None if it is called with something else."""
        x, y = args
        unit = self.unit
        if type(x) is not Traced or type(y) is not Traced or x.plain is not None or y.plain is not None:
            return None
        before = (y if self.place == 0 else x).waiting
        if before is None or before.unit is not unit or before.result is not None or not unit.reads_bytes:
            return None
        operands = {**before.operands, self.operand: args[self.place]}
        done = before.done | self.bit
        if len(operands) != len(unit.operands) or (self.is_last and done != unit.all_bits):
            return None
        made = run.queue.put_off(self.number, unit, [operands[number] for number in unit.reading], unit.grids_read)
        if made is None:
            return None
        if not self.is_last:
            result = Done(made)
            waiting = Waiting(unit, self.number, self.func, (kept(x), kept(y)), NOTHING, operands, result, done)
            made = to_be_fused(result.body, waiting)
        return written(x, made) if self.writes else made


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
        if type(x) is Traced and x.plain is not None:
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
