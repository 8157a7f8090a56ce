"""Calls that are part of one fused op.

The op runs when its last operand is there. Earlier calls, and those whose work it has done already, return stages. The parts
of a stage (bytes, private copies of floats, weights checked for changes) are immutable, so it can be read at any time, even if
the next call of the fused op never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.capture.runtime.write_detection import is_tracked
from quantc.errors import InputError
from quantc.flows.tracing.fused_ops import Unit, reach
from quantc.flows.tracing.run import Run
from quantc.flows.tracing.traced_tensor import Buffer, Levels, Traced, call_on_floats, floats_of, make_traced, value_of


@dataclass(slots=True, eq=False)
class Stage:
    """Placeholder for an intermediate result inside a fused op."""

    unit: Unit
    call: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """The arguments: values, private floats, and weights."""
    operands: dict[int, Any]
    """The operands of the fused op so far."""
    result: Any
    """The result of the fused op, once it ran: bytes, or floats that are not shared."""
    shape: torch.Size
    dtype: torch.dtype
    autocast: torch.dtype | None
    """The dtype of autocast where it was called."""
    check: Callable[[], None]
    """Refuses weights that are other ones by now."""
    has_grads: bool = False
    """Grad mode at the call."""

    def floats(self) -> Tensor:
        """The result of the function itself, computed in float from the operands of the fused op."""
        self.check()
        args, kwargs = pytree.tree_map(_floats, (self.args, self.kwargs), is_leaf=_is_value)
        if self.call in self.unit.in_place and isinstance(args[0], Tensor):
            args = (args[0].clone(), *args[1:])
        is_other = self.autocast is not None or torch.is_autocast_enabled("cpu")
        mode = torch.autocast("cpu", self.autocast, enabled=self.autocast is not None) if is_other else nullcontext()
        with mode:
            made: Tensor = self.func(*args, **kwargs)
        return made


def _is_value(x: Any) -> bool:
    return type(x) is Levels or type(x) is Stage


def _floats(x: Any) -> Any:
    return x.floats() if _is_value(x) else x


def _stages(unit: Unit, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Stage] | None:
    """The stages of the same fused op that a call was given; None if they are not those that led there when it was recorded."""
    found: list[Stage] = []
    for path, name in unit.links[number]:
        value = value_of(reach(args, kwargs, path))
        if type(value) is not Stage or value.unit is not unit or unit.makes[value.call] != name:
            return None
        found.append(value)
    if len(found) > 1:
        first = found[0].operands
        if any(row.operands.get(index, x) is not x for row in found[1:] for index, x in first.items()):
            return None
    return found


def _operands(unit: Unit, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any] | None:
    """The operands that a call contributes to the fused op; None if they do not match the recording."""
    found: dict[int, Any] = {}
    for index, path in unit.by_call.get(number, ()):
        x = found[index] = reach(args, kwargs, path)
        if not isinstance(x, Tensor) or not _may_be(x, unit.operands[index].dtype):
            return None
    return found


def _may_be(x: Tensor, dtype: torch.dtype | None) -> bool:
    """True if a tensor has the recorded dtype. Under autocast, float32 and the autocast dtype match each other."""
    value = value_of(x)
    found = floats_of(x).dtype if value is None else value.dtype
    if dtype is None or found is dtype:
        return True
    both = (torch.float32, torch.get_autocast_dtype("cpu"))
    return torch.is_autocast_enabled("cpu") and found in both and dtype in both


def _keep_arguments(args: Any, known: dict[int, Any], run: Run) -> Any:
    """A snapshot of arguments, for later reads; `known` holds earlier snapshots by id."""

    def now(x: Any) -> Any:
        if isinstance(x, Tensor):
            if not run.is_live:
                if id(x) in known:
                    return known[id(x)]
                if id(x) in run.bound.names:
                    return x
            return value_of(x) or floats_of(x).clone()
        kind = type(x)
        return kind([now(row) for row in x]) if kind is list or kind is tuple else x

    return {name: now(x) for name, x in args.items()} if type(args) is dict else tuple([now(x) for x in args])


def advance(unit: Unit, number: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], run: Run) -> Any:
    """Any call of those that a fused op is made of. The function itself is called where the op cannot stand for it."""
    target = args[0] if args else None
    before, own = _stages(unit, number, args, kwargs), _operands(unit, number, args, kwargs)
    is_other = before is None or own is None or (kwargs and kwargs.get("out") is not None)
    _check_training(unit, number, None if is_other else before, run)
    if is_other or before is None or own is None:
        return call_on_floats(func, args, kwargs)
    if run.is_live and number in unit.in_place:
        args = run.read_before_written(args)
        own = _operands(unit, number, args, kwargs) or {}
    operands, known = own, {}
    if unit.is_fused:
        operands = {index: run.snapshot(unit, index, x) for index, x in own.items()}
        known = {id(x): operands[index] for index, x in own.items()}
        for stage in before:
            operands |= stage.operands
    result: Any = next((stage.result for stage in before if stage.result is not None), None)
    if number == unit.trigger:
        if len(operands) != len(unit.operands):
            return call_on_floats(func, args, kwargs)
        result = run.compute(unit, operands)
        if isinstance(result, tuple | list):  # an op of several results is never fused
            return result
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    grads = torch.is_grad_enabled()
    has_run = result is not None
    if has_run and autocast is None:
        shape, dtype = result.shape, result.dtype
    else:
        shape, dtype = run.looks_of(number, func, args, kwargs, autocast)
    made: Any
    if number != unit.members[-1]:
        given = _keep_arguments(args, known, run), _keep_arguments(kwargs, known, run) if kwargs else kwargs
        made = Stage(unit, number, func, *given, operands, result, shape, dtype, autocast, run.check_weights, grads)
    else:
        made = _result(unit, result, dtype)
    if number in unit.in_place:
        made = _write_back(target, made, partial(func, target, *args[1:], **kwargs), number in unit.passive, run)
    elif not isinstance(made, Tensor):
        made = make_traced(made)
    run.gives(unit, number, made, result)
    return made


def _result(unit: Unit, result: Any, dtype: torch.dtype) -> Any:
    """The result of the last call of a fused op, in the given dtype, not aliased with that of another call."""
    if type(result) is Levels:
        return result if dtype is result.dtype else Levels(result.levels, result.grid, dtype)
    made = result.clone() if unit.is_fused or unit.yielded else result
    return made if made.dtype is dtype else made.to(dtype)


def _check_training(unit: Unit, number: int, before: list[Stage] | None, run: Run) -> None:
    """In training: refuse a call that leaves the fused op, if a norm would not learn from the batch once; and a fused op of which some
    calls are made under torch.no_grad() and others are not. It is computed at once, so that gradients would reach what the model
    keeps them from, or not what it trains."""
    if not run.is_live:
        return
    if before is None:
        run.refuse_norms(unit, number)
        return
    now = torch.is_grad_enabled()
    trains = any(run.constants[name].requires_grad for _, name in unit.constants[number])
    for stage in before:
        if stage.has_grads is not now and (stage.result is None or (now and trains)):
            first, last = run.bound.sites[stage.call], run.bound.sites[number]
            raise run.refuse(
                InputError(
                    f"{first.name} at {first.where} and {last.name} at {last.where} are one fused op, and one of them is under "
                    "torch.no_grad()",
                    where=last.where,
                    advice="freeze the parameters instead: requires_grad_(False); or leave one of both float with a config",
                )
            )


def follow(unit: Unit, number: int, func: Callable[..., Any], x: Any, run: Run) -> Any:
    """`advance`, for a call that reads but one tensor: in short where that is bytes on the right grid, or the work is done."""
    value = value_of(x)
    is_last, is_written = number == unit.members[-1], number in unit.in_place
    if torch.is_autocast_enabled("cpu") or (is_written and (type(x) is not Traced or x._quantc_buffer is not None)):
        return advance(unit, number, func, (x,), {}, run)
    if type(value) is Levels:
        index = unit.begins.get(number, -1)
        if index < 0 or value.grid is not unit.grids[index] or value.dtype is not torch.float32:
            return advance(unit, number, func, (x,), {}, run)
        operands: dict[int, Any] = {index: value}
        result = run.compute(unit, operands) if number == unit.trigger else None
    elif type(value) is Stage and value.unit is unit and value.result is not None and number != unit.trigger:
        if value.autocast is not None or unit.makes[value.call] != unit.links[number][0][1]:
            return advance(unit, number, func, (x,), {}, run)
        operands, result = value.operands, value.result
    else:
        return advance(unit, number, func, (x,), {}, run)
    made: Any
    if not is_last:
        shape = run.looks_of(number, func, (x,), {}, None)[0] if result is None else result.shape
        made = Stage(unit, number, func, (value,), {}, operands, result, shape, torch.float32, None, run.check_weights)
    elif type(result) is Levels:
        made = result
    elif isinstance(result, Tensor) and not is_written:
        return result.clone() if unit.is_fused else result
    else:
        return advance(unit, number, func, (x,), {}, run)
    if not is_written:
        return make_traced(made)
    x._quantc_value = made
    return x


def _write_back(x: Any, made: Any, call: partial[Any], is_passive: bool, run: Run) -> Any:
    """Store the result of an in-place call in its tensor, in the memory of its floats if it has any."""
    is_value = not isinstance(made, Tensor)
    if type(x) is Traced and (x._quantc_buffer is None or is_passive):
        x._quantc_value = made if is_value else None
        if not is_value:
            x._quantc_buffer = Buffer(made)
        return x
    if type(x) is not Traced and type(made) is Stage:  # memory of the user's, which a stage of the fused op describes
        call_on_floats(call.func, call.args, call.keywords)
        return make_traced(made, Buffer(x, run.escapes)) if is_tracked(x) else x
    was_whole = value_of(x) is not None
    with torch._C.DisableTorchFunctionSubclass():
        floats_of(x).copy_(made.floats() if is_value else made)
    if type(x) is Traced and x._quantc_buffer is not None:
        x._quantc_value = made if is_value and was_whole else None
        x._quantc_buffer = Buffer(x._quantc_buffer.floats, x._quantc_buffer.escapes)
    return x
