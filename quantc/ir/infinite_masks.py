"""Detection of masks: tensors that may hold infinities, because all they do is exclude positions from a softmax.

Masks are made of minus infinity. It never reaches a grid: rules exclude masks, and the output of a softmax is finite.
In any other tensor infinity is an error, as NaN is.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from quantc.ir.dialect import ADDING, argument, op_name, ops_in, traits_of
from quantc.ir.op_row import Family, Trait
from quantc.ir.types import dtype_of, tensor_type

SOFTMAX = frozenset({*ops_in(Family.SOFTMAX), "aten._safe_softmax.default", "aten._softmax.default"})
HANDS_ON = frozenset(
    {"add", "sub", "rsub", "mul", "neg", "where", "masked_fill", "cast", "maximum", "minimum", "clamp"}
    | {f"aten.{name}" for name in ("masked_fill.Tensor", "triu.default", "tril.default", "where.ScalarOther")}
    | {f"aten.{name}" for name in ("where.ScalarSelf", "lift_fresh_copy.default")}
)
"""Ops that propagate masks from operand to result, beside the value-preserving ones."""
BOUNDS = frozenset(
    {"maximum", "minimum", "amax", "amin", "max", "min", "topk", "sigmoid", "tanh"}
    | {f"aten.{name}.default" for name in ("exp", "exp2", "logsumexp", "max", "min")}
    | {f"aten.{name}.Tensor" for name in ("clamp", "clamp_min", "clamp_max")}
)
"""Ops that absorb an infinite constant: the initial value of a maximum, or positions masked out of one."""


OF_ITS_SIZE = frozenset(
    {"sym_size", "aten.sym_numel.default", "aten.sym_stride.int"}
    | {f"aten.{name}_like.default" for name in ("zeros", "ones", "full", "empty", "rand", "randn")}
    | {f"aten.new_{name}.default" for name in ("zeros", "ones", "full", "empty")}
)
"""Ops that read the size or dtype of a tensor and none of its values."""
ROW_BY_ROW = frozenset({*ops_in(Family.SOFTMAX), "aten._softmax.default", "aten._log_softmax.default"})
"""Softmaxes that give NaN for a row of minus infinity. The others, and attention, give zeros."""
KEEPS_LAST_AXIS = frozenset(
    {"expand", "repeat", "cast", "contiguous", "clone", "detach", "aten.lift_fresh_copy.default"}
)
"""Ops that preserve the last axis, or broadcast a single element along it."""
KEEPS_LAST_SIZE = frozenset({"reshape", "flatten", "unflatten", "squeeze", "aten.view.default", "aten.squeeze.dims"})
"""Ops that keep the order of elements: an unchanged size of the last axis means unchanged rows."""


def is_mask(node: fx.Node) -> bool:
    """True if everything computed from a tensor ends in softmaxes, or is not float. A constant may also end in
    `BOUNDS`."""
    ends = SOFTMAX | BOUNDS if node.op == "get_attr" else SOFTMAX
    pending, seen = [node], {node}
    found = False
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op == "call_function" and op_name(user) in OF_ITS_SIZE:
                continue
            if _ends(user, value, ends):
                found = True
                continue
            if not _hands_on(user, value):
                return False
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return found


def masks_rows(node: fx.Node) -> bool:
    """True if the rows of a tensor, along its last axis, are added to the rows of a softmax: a row of minus infinity
    alone, or plus infinity, makes them NaN."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op != "call_function" or user in seen:
                continue
            if op_name(user) in ROW_BY_ROW and _is_last(argument(user, "dim"), value):
                return True
            if _keeps_rows(user, value):
                seen.add(user)
                pending.append(user)
    return False


def _keeps_rows(user: fx.Node, value: fx.Node) -> bool:
    name, is_first = op_name(user), user.args[:1] == (value,)
    before, after = tensor_type(value), tensor_type(user)
    if name in KEEPS_LAST_AXIS:
        return is_first
    if name == "add":
        return argument(user, "alpha") == 1 or is_first
    if name == "sub":
        return is_first and value not in user.args[1:]
    if name in ADDING:
        return is_first and argument(user, "beta") == 1
    if before is None or after is None or not (before.rank and after.rank):
        return False
    if name in KEEPS_LAST_SIZE:
        return before.shape[-1] == after.shape[-1]
    if name == "unsqueeze":
        return not _is_last(argument(user, "dim"), user)
    if name == "transpose":
        return not any(_is_last(argument(user, dim), value) for dim in ("dim0", "dim1"))
    return name == "permute" and _is_last(argument(user, "dims")[-1], value)


def _is_last(axis: Any, value: fx.Node) -> bool:
    kind = tensor_type(value)
    return axis == -1 or (kind is not None and axis == kind.rank - 1)


def _ends(user: fx.Node, value: fx.Node, ends: frozenset[str]) -> bool:
    if user.op != "call_function":
        return False
    name, kind = op_name(user), dtype_of(user)
    is_compared = kind is not None and not kind.is_floating_point and "quantize" not in name
    return is_compared or name in ends or (name == "sdpa" and value not in user.args[:3])


def _hands_on(user: fx.Node, value: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    name = op_name(user)
    if name in ADDING:
        return user.args[0] is value and value not in user.args[1:]
    return name in HANDS_ON or Trait.PRESERVES_VALUES in traits_of(user)
