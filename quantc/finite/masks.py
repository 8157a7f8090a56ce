"""Which tensors may hold infinities: those that take positions out of a softmax, and do nothing else.

Minus infinity is what a mask is made of. It never meets a grid: rules keep away from masks, and behind the softmax all is
finite again. In any other tensor infinity is a fault, as NaN is.
"""

from __future__ import annotations

from torch import fx

from quantc.dialect import Trait, op_name, traits_of
from quantc.types import dtype_of

SOFTMAX = frozenset({"softmax", "log_softmax", "aten._safe_softmax.default", "aten._softmax.default"})
HANDS_ON = frozenset(
    {"add", "sub", "rsub", "mul", "neg", "where", "masked_fill", "cast", "maximum", "minimum", "clamp"}
    | {f"aten.{name}" for name in ("masked_fill.Tensor", "triu.default", "tril.default", "where.ScalarOther")}
    | {f"aten.{name}" for name in ("where.ScalarSelf", "lift_fresh_copy.default")}
)
"""Ops of which the result may be a mask where an operand is one, beside those that preserve values."""
ADDED = frozenset({"baddbmm", "addmm"})
"""Products that add their first operand."""
BOUNDS = frozenset(
    {"maximum", "minimum", "amax", "amin", "max", "min", "topk", "sigmoid", "tanh"}
    | {f"aten.{name}.default" for name in ("exp", "exp2", "logsumexp", "max", "min")}
    | {f"aten.{name}.Tensor" for name in ("clamp", "clamp_min", "clamp_max")}
)
"""Ops that get rid of infinity where it is a constant: the beginning of a maximum, or what is masked out of one."""


def is_mask(node: fx.Node) -> bool:
    """Whether all that is made of a tensor goes into softmaxes, or is no float. A constant may also be a bound."""
    ends = SOFTMAX | BOUNDS if node.op == "get_attr" else SOFTMAX
    pending, seen = [node], {node}
    found = False
    while pending:
        value = pending.pop()
        for user in value.users:
            if _ends(user, value, ends):
                found = True
                continue
            if not _hands_on(user, value):
                return False
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return found


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
    if name in ADDED:
        return user.args[0] is value and value not in user.args[1:]
    return name in HANDS_ON or Trait.PRESERVES_VALUES in traits_of(user)
