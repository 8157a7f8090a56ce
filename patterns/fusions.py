"""The rules for folding ops into a preceding convolution or linear. `passes/fuse.py` does the arithmetic.

Each rule binds the node it folds into (`conv` or `linear`) and its operands `x`, `w`, `b`; the root is the node that
disappears. Batch norm adds `gamma`, `beta`, `mean`, `var`; a constant operand is `c`, a tensor or a number.
"""

from __future__ import annotations

import torch
from torch import fx

from quantc.ir.dialect import argument, op_name
from quantc.ir.types import tensor_type
from quantc.patterns import aten
from quantc.patterns.dsl import Pattern, any_of, op
from quantc.patterns.operand_patterns import const, number
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Match
from quantc.patterns.table import Rule, RuleTable

conv = op(*aten.conv.ops, *aten.conv_transpose.ops)("x", const("w"), const("b?")).named("conv")
linear = aten.linear("x", const("w"), const("b?")).named("linear")
batch_norm = aten.batch_norm("_", const("gamma?"), const("beta?"), const("mean"), const("var")).having(training=False)
constant = any_of(const("c"), number("c"))


@predicate("norm-over-channels")
def why_not_norm_over_channels(match: Match) -> str | None:
    """Batch norm works on axis 1; that must be the producer's output channel axis."""
    producer = _producer(match)
    made = tensor_type(producer)
    if made is None:
        return f"the shape of {producer.name} is unknown, so its channels may not lie on axis 1"
    axis = made.rank + _channel_axis(producer)
    return None if axis == 1 else f"{producer.name} is {made}: its channels lie on axis {axis}, not 1"


@predicate("constant-by-channel")
def why_not_constant_by_channel(match: Match) -> str | None:
    """The constant must be one number, or one number a channel, and preserve shape and dtype."""
    weight = match.program.tensor(match.node("w"))
    factor = match.program.tensor(match["c"]) if isinstance(match["c"], fx.Node) else match["c"]
    if weight is None or factor is None:
        return "its constants cannot be read"
    if not weight.is_floating_point():
        return f"the weight is {weight.dtype}, and folding is for floats"
    if torch.result_type(weight, factor) != weight.dtype:
        return f"{match.root.name} turns {weight.dtype} into {torch.result_type(weight, factor)}"
    if not isinstance(factor, torch.Tensor):
        return None
    return _why_not_broadcast(_producer(match), weight, factor)


def _why_not_broadcast(producer: fx.Node, weight: torch.Tensor, factor: torch.Tensor) -> str | None:
    """Every axis but the channel axis must be of size 1; there it is 1 or the number of channels."""
    axis, channels = _channel_axis(producer), _channels(producer, weight)
    if channels is None:
        return f"the number of channels of {producer.name} is unknown"
    made = tensor_type(producer)
    rank = -axis if made is None else made.rank  # an unknown shape has at least the axes up to the channels
    if factor.dim() > rank:
        return f"the constant has {factor.dim()} axes, {producer.name} {'perhaps ' if made is None else ''}only {rank}"
    for place, size in enumerate(factor.shape, start=-factor.dim()):
        if size != 1 and (place != axis or size != channels):
            return f"the constant is {list(factor.shape)}: axis {place} does not go by the {channels} channels"
    return None


def _producer(match: Match) -> fx.Node:
    return match.node("conv" if "conv" in match.bindings else "linear")


def _channel_axis(producer: fx.Node) -> int:
    """The output channel axis as a negative index: last for linear, before the spatial axes for a convolution."""
    name = op_name(producer)
    return -1 if name == "linear" else -1 - int(name[-2])


def _channels(producer: fx.Node, weight: torch.Tensor) -> int | None:
    if weight.dim() < 2:
        return None
    if op_name(producer) not in aten.conv_transpose.ops:
        return weight.shape[0]
    groups = argument(producer, "groups")
    return weight.shape[1] * groups if isinstance(groups, int) else None


def _with_constant(prefix: str, producer: Pattern) -> tuple[Rule, ...]:
    consumers = {"mul": aten.mul, "div": aten.div, "add": aten.add, "sub": aten.sub}
    return tuple(
        Rule(f"{prefix}-{name}", producer >> consumer("_", constant), when="constant-by-channel")
        for name, consumer in consumers.items()
    )


NORMS = RuleTable(
    "norms",
    (
        Rule("conv-bn", conv >> batch_norm, when="norm-over-channels"),
        Rule("linear-bn", linear >> batch_norm, when="norm-over-channels"),
    ),
)
"""Convolutions and linears followed by batch norm in inference."""

FUSIONS = RuleTable(
    "fusions",
    (
        *NORMS,
        *_with_constant("conv", conv),
        *_with_constant("linear", linear),
    ),
)
"""Convolutions and linears followed by batch norm in inference, or by arithmetic with a constant."""
