"""Rule table of FX graph mode: the ops of torch's own quantized kernels.

Ops that move values, or keep them in range, give their result the scale of their input, and request it quantized
wherever they stand, as torch's FX graph mode does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantc.annotate.quantizer import Backend
from quantc.backends import masks, rules
from quantc.flows.fx.custom_config import QuantType
from quantc.patterns import aten
from quantc.patterns.dsl import Pattern, op, optional
from quantc.patterns.operand_patterns import const
from quantc.patterns.rule import Match
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Offer, Role
from quantc.spec.spec import UINT8

ALONE = {"x": "act", "out": "act"}
BOTH = {"x": "act", "y": "act", "out": "act"}
SHARED = {"x": "act", "out": "like x"}
SHARED_LIST = {"xs": "act", "out": "like xs"}
WEIGHTED = {"x": "act", "w": "weight", "out": "act"}

PER_AXIS_1 = "weight-transposed"
relu = optional(aten.relu)
smooth = op("hardswish", "leaky_relu", "elu", args="x")
norms = op("layer_norm", "group_norm", "instance_norm", args="x")
pools = op(*rules.max_pool.ops, *aten.avg_pool.ops, *aten.adaptive_avg_pool.ops, "mean", args="x")
moves = op(
    *(*aten.reshape.ops, *aten.squeeze.ops),
    *(*aten.transpose.ops, "repeat", "aten.repeat_interleave.self_int"),
    *(*aten.shuffle.ops, *aten.copy.ops, *aten.upsample.ops, *aten.upsample_linear.ops),
    args="x",
)


def _rule(name: str, pattern: Pattern, roles: dict[str, str], dynamic: Offer = Offer.NO) -> Rule:
    supports = {"qdq"} if name in rules.NOT_INTEGER or name in ("move", "cut", "dropout") else {"qdq", "integer"}
    return Rule(name, pattern, roles, when=(masks.NO_MASK,), supports=supports, dynamic=dynamic)


TABLE = RuleTable(
    "native",
    (
        _rule("conv", rules.conv >> relu, WEIGHTED),
        _rule("conv-transpose", aten.conv_transpose("x", const("w"), "b?"), {**WEIGHTED, "w": PER_AXIS_1}),
        _rule("linear", rules.linear >> relu, WEIGHTED, Offer.YES),
        _rule("add", aten.add >> relu, BOTH),
        _rule("mul", aten.mul >> relu, BOTH),
        _rule("matmul", aten.matmul, BOTH),
        _rule("add-number", rules.with_number(aten.add) >> relu, ALONE),
        _rule("mul-number", rules.with_number(aten.mul) >> relu, ALONE),
        _rule("batch-norm", rules.batch_norm >> relu, ALONE),
        _rule("norm", norms, ALONE),
        _rule("activation", smooth, ALONE),
        _rule("prelu", aten.prelu, ALONE),
        _rule("sigmoid", op(*rules.ranged("unit"), args="x"), {"x": "act", "out": "unit"}),
        _rule("tanh", aten.tanh, {"x": "act", "out": "signed-unit"}),
        _rule("softmax", op("softmax", args="x"), {"x": "act", "out": "unit"}),
        _rule("clamp", aten.clamp, SHARED),
        _rule("pool", pools, SHARED),
        _rule("move", moves, SHARED),
        _rule(
            "cut", aten.cut, {"x": "pass", "out": "like x"}
        ),  # a part of what is quantized, and nothing for its own sake
        _rule("dropout", aten.dropout.having(train=False), SHARED),  # stands in the graph while it is trained
        _rule("cat", aten.cat, SHARED_LIST),
        _rule("stack", aten.stack, SHARED_LIST),
        *(_rule(rule.name, rule.pattern, dict(rule.roles), Offer.YES) for rule in rules.RECURRENT),
        *(_rule(rule.name, rule.pattern, dict(rule.roles)) for rule in rules.LOOKUPS),
    ),
)

KINDS: Mapping[str, tuple[QuantType, ...]] = {
    "linear": (QuantType.STATIC, QuantType.DYNAMIC),
    **dict.fromkeys((rule.name for rule in rules.RECURRENT), (QuantType.DYNAMIC,)),
    **dict.fromkeys((rule.name for rule in rules.LOOKUPS), (QuantType.WEIGHT_ONLY,)),
}
"""The kinds of quantization of each rule; static by default."""
FIXED_RULES = ("sigmoid", "tanh", "softmax")
"""Rules whose results have a range that is known beforehand."""

TAKES = (
    *rules.TAKES,
    Capability(role=Role.ACT, dtypes=(DType.UINT8, DType.INT8)),
    Capability(role=Role.WEIGHT, dtypes=(DType.INT8, DType.UINT8), granularities=("per-tensor", "per-channel")),
)
"""The specs that QConfigs may request: 8-bit integers of either sign. QNNPACK has kernels for all; on x86, all but unsigned
activations with signed weights run in the integer form."""


@dataclass(frozen=True)
class FlowBackend(Backend):
    """A backend for QConfigs: beside its rules it says which kinds of QConfigs they take."""

    kinds: Mapping[str, tuple[QuantType, ...]] = field(default_factory=lambda: KINDS)
    """The kinds of quantization of each rule; static by default."""
    known_ranges: frozenset[str] = frozenset(FIXED_RULES)
    """Rules whose results have a range that is known beforehand."""
    formats: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The formats of a rule (`DTypeConfig`); those of `takes` by default."""
    spelled: Mapping[str, Callable[[Match], str | None]] = field(default_factory=dict)
    """For rules that are about some layers or functions only: why a match is none of these."""


NATIVE = FlowBackend(
    "native",
    TABLE,
    roles={"act": UINT8, **rules.WEIGHT_ROLES, **rules.known_ranges(UINT8)},
    takes=TAKES,
    summary="What FX graph mode quantizes: every op reads and yields quantized tensors, with the specs of its QConfig.",
)
