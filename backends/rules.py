"""Shared parts of backend tables: patterns, roles, conditions, and rules that propagate quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantc.backends import masks
from quantc.ir.decisions import Fixed
from quantc.ir.dialect import RANGES, argument, ops_in
from quantc.ir.op_row import Family, byte_grid
from quantc.ir.types import tensor_type
from quantc.passes.decompose_attention import DecomposeAttention
from quantc.passes.decompose_einsum import DecomposeEinsum
from quantc.passes.fold_constants import FoldConstants
from quantc.patterns import aten
from quantc.patterns.checks import differs, one_of
from quantc.patterns.dsl import OpPattern, Pattern, any_of, op
from quantc.patterns.operand_patterns import const, number, value
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Match
from quantc.patterns.table import Rule
from quantc.pipeline.pipeline import Pass
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Offer, PerChannel, PerTensor, Role, Scheme, Timing
from quantc.spec.spec import INT8_NARROW_WEIGHT, INT8_WEIGHT_ONLY, UINT8, UINT8_DYNAMIC, QuantSpec

# -- roles ---------------------------------------------------------------------------------------------------------

ACT = UINT8.but(observe="mse")
WEIGHT_ROLES: Mapping[str, QuantSpec] = {
    "weight": INT8_NARROW_WEIGHT,
    "weight-transposed": INT8_NARROW_WEIGHT.but(granularity=PerChannel(axis=1)),
    "weight-whole": INT8_NARROW_WEIGHT.but(granularity=PerTensor()),
}
"""The output channels lie on axis 0, but on axis 1 in transposed convolutions and in the second operand of a product.
In transposed convolutions with groups they lie on no single axis. The range is -127..127: in -128..127 the step is
1/127.5 of the largest weight, which then rounds to 128 and is clipped if it is positive. Few weights a channel, as in
depthwise convolutions, make that the largest error of all."""


FLOAT_FORMATS = (DType.FP16, DType.FP8_E4M3, DType.FP8_E5M2)
WEIGHT_ONLY = (
    Capability(
        role=Role.WEIGHT,
        dtypes=(DType.INT8, DType.INT4, DType.INT2),
        granularities=("per-tensor", "per-channel", "per-group"),
        timings=(Timing.WEIGHT_ONLY,),
    ),
    Capability(
        role=Role.WEIGHT,
        dtypes=FLOAT_FORMATS,
        schemes=(Scheme.SYMMETRIC,),
        granularities=("per-tensor", "per-channel"),
        timings=(Timing.WEIGHT_ONLY,),
    ),
)
"""Weights that are brought back to float before the op computes: any format will do."""
TAKES = (
    Capability(role=Role.ACT, dtypes=(DType.UINT8,)),
    Capability(
        role=Role.ACT,
        dtypes=(DType.UINT8, DType.INT8),  # kernels quantize their inputs: int8 is uint8 shifted by 128
        granularities=("per-tensor", "per-token"),
        timings=(Timing.DYNAMIC,),
    ),
    Capability(
        role=Role.WEIGHT,
        dtypes=(DType.INT8,),
        schemes=(Scheme.SYMMETRIC,),
        granularities=("per-tensor", "per-channel"),
    ),
    *WEIGHT_ONLY,
)
"""The specs that torch's kernels for x86 and QNNPACK accept."""

SMALLEST_RUN_TIME_SCALE = 2.0**-14
MODES: Mapping[str, QuantSpec] = {
    "dynamic": UINT8_DYNAMIC.but(eps=SMALLEST_RUN_TIME_SCALE),
    "weight-only": INT8_WEIGHT_ONLY.but(qmin=-127),
}
"""The spec of each mode of `qc.quantize(..., mode=...)`. fbgemm's smallest scale is 2^-14 too."""


def taken_apart(products: Offer = Offer.YES) -> tuple[Pass, ...]:
    """Passes before annotation for backends with rules for matmuls of two activations; `products` says when these are quantized."""
    return DecomposeAttention(products=products), DecomposeEinsum(), FoldConstants()


RANGE_ROLES: Mapping[tuple[float, float], str] = {(0.0, 1.0): "unit", (-1.0, 1.0): "signed-unit"}
"""The roles of results with a range of their own."""


def ranged(role: str) -> tuple[str, ...]:
    """The activations whose results have the range of a role, by name."""
    return tuple(name for name in ops_in(Family.ACTIVATION) if name in RANGES and RANGE_ROLES[RANGES[name]] == role)


def known_ranges(spec: QuantSpec) -> dict[str, Fixed]:
    """Roles of results with a fixed range: `unit` is 0..1, `signed-unit` -1..1."""
    return {
        role: Fixed(scale, spec.qmin + zero_point, spec)
        for ends, role in RANGE_ROLES.items()
        for scale, zero_point in [byte_grid(*ends)]
    }


# -- patterns ------------------------------------------------------------------------------------------------------

conv = aten.conv("x", const("w"), "b?")
conv_transpose = aten.conv_transpose("x", const("w"), "b?").having(groups=1)
conv_transpose_grouped = aten.conv_transpose("x", const("w"), "b?").having(groups=differs(1))
linear = aten.linear("x", const("w"), "b?")
linear_computed = aten.linear("x", "w", "b?")
matmul_constant = aten.matmul("x", const("w", rank=2))
addmm_constant = aten.addmm("_", "x", const("w", rank=2))
addmm = aten.addmm("_", "x", "y")
baddbmm = aten.baddbmm("_", "x", "y")
softmax = op("softmax", "aten._safe_softmax.default", args="x")
batch_norm = aten.batch_norm.having(training=False)
pad_with_zero = aten.pad.having(value=one_of(None, 0))
max_pool = op(
    *aten.max_pool.ops,
    "max_pool2d_with_indices",
    *(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)),
    args="x",
)
average = op(*aten.avg_pool.ops, *aten.adaptive_avg_pool.ops, "mean", args="x")
image_average = any_of(
    op(*aten.avg_pool.ops, *aten.adaptive_avg_pool.ops, args="x"), op("mean", args="x")(value("x", rank=(1, 2, 4, 5)))
)
"""A mean of tokens is smaller than the largest of them, and a grid like theirs would round most of it away."""


def with_number(pattern: OpPattern) -> OpPattern:
    """A binary op of a tensor and a number."""
    return pattern("x", number("c"))


# -- rules ---------------------------------------------------------------------------------------------------------


NOT_INTEGER: Mapping[str, str] = {
    **dict.fromkeys(
        ("lstm", "gru", "rnn", "lstm-cell", "gru-cell", "rnn-cell"),
        "static: the state stays float, and feeds back into every product; with run-time scales it is integer",
    ),
    "linear-prelu": "slopes may lie along another axis than the scales of the weight; the product itself is integer",
    "embedding-bag": "it adds rows that have scales of their own, and yields float",
    "upsample-linear": "it weighs its neighbours with real numbers, not with integers",
    "softmax-of-float": "what it reads is float",
}
"""The rules without an integer form, by name, and why. Every other rule has one."""


DYNAMIC: Mapping[str, Offer] = {
    **dict.fromkeys(("linear", "matmul-constant", "addmm-constant"), Offer.YES),
    **dict.fromkeys(("lstm", "gru", "rnn", "lstm-cell", "gru-cell", "rnn-cell"), Offer.YES),
    **dict.fromkeys(("conv", "conv-transpose", "conv-transpose-grouped"), Offer.NAMED),
    **dict.fromkeys(("linear-computed", "matmul", "addmm", "baddbmm"), Offer.NAMED),
}
"""The rules that can find scales as the program runs, by name. Products of two activations round both for a product
that few kernels speed up; images have ranges that calibration knows as well, and one scale for all of one costs the
early layers most."""


def rule(
    name: str, pattern: Pattern, roles: Mapping[str, str], *, when: Sequence[str] = (), static: Offer = Offer.YES
) -> Rule:
    """A rule of the Q/DQ form that excludes masks; of the integer form too, unless NOT_INTEGER gives a reason."""
    supports = {"qdq"} if name in NOT_INTEGER else {"qdq", "integer"}
    dynamic = DYNAMIC.get(name, Offer.NO)
    when = (*when, masks.NO_MASK)
    return Rule(name, pattern, roles, when=when, supports=supports, static=static, dynamic=dynamic)


def product(out: str, weight: str = "weight") -> dict[str, str]:
    """Roles of an op with a weight. The bias stays float: it is added to exact sums."""
    return {"x": "act", "w": weight, "out": out}


PASS_ON = {"x": "pass", "out": "like x"}
PASS_ON_LIST = {"xs": "pass", "out": "like xs"}

MOVES: tuple[Rule, ...] = (
    rule("reshape", op(*aten.reshape.ops, *aten.squeeze.ops, args="x"), PASS_ON),
    rule("transpose", aten.transpose, PASS_ON),
    rule("expand", aten.expand, PASS_ON),
    rule("slice", aten.cut, PASS_ON),
    rule("split", aten.part, PASS_ON),
    rule("gather", aten.pick, PASS_ON),
    rule("flip", aten.move, PASS_ON),
    rule("shuffle", aten.shuffle, PASS_ON),
    rule("copy", aten.copy, PASS_ON),
    rule("pad", pad_with_zero, PASS_ON),
    rule("upsample", aten.upsample, PASS_ON),
)
"""Every element that comes out went in, or is zero: the scale stays."""

WITHIN: tuple[Rule, ...] = (
    rule("max-pool", max_pool, PASS_ON),
    rule("extreme", aten.extreme, PASS_ON),
    rule("clamp", aten.clamp, PASS_ON),
)
"""Ops whose results are some of their input values, or a bound: they keep the scale."""

RECURRENT: tuple[Rule, ...] = tuple(
    rule(name, pattern, {"x": "act", "params": "weight"})
    for name, pattern in (("lstm", aten.lstm), ("gru", aten.gru), ("rnn", aten.rnn))
) + tuple(
    rule(name, pattern, {"x": "act", "w_ih": "weight", "w_hh": "weight"})
    for name, pattern in (("lstm-cell", aten.lstm_cell), ("gru-cell", aten.gru_cell), ("rnn-cell", aten.rnn_cell))
)
"""Inputs and weights are quantized. Hidden state, biases and results stay float: the state feeds back into itself, and
an error in it would grow with the length of the sequence."""

LOOKUPS: tuple[Rule, ...] = (
    rule("embedding", aten.embedding, {"w": "weight"}),
    rule("embedding-bag", aten.embedding_bag, {"w": "weight"}),
)
"""The table is stored quantized, with a scale for each row; what is looked up is float."""

# -- conditions ----------------------------------------------------------------------------------------------------


@predicate("same-shape")
def why_not_same_shape(match: Match) -> str | None:
    """Both sides of an add that is fused as an epilogue have one shape: nothing is broadcast."""
    result = tensor_type(match.root)
    joined = next(node for node in reversed(match.nodes) if match["y"] in node.all_input_nodes)
    for side in joined.all_input_nodes:
        found = tensor_type(side)
        if result is None or found is None:
            return "the shapes are unknown; capture with example inputs"
        if found.shape != result.shape:
            return f"{side.name} is {found}, and the sum {result}"
    return None


@predicate("stride-within-kernel")
def why_not_stride_within_kernel(match: Match) -> str | None:
    """A pool may not leave gaps between windows."""
    kernel, stride = argument(match.root, "kernel_size"), argument(match.root, "stride")
    wide = [step for step, size in zip(stride or kernel, kernel, strict=False) if step > size]
    return f"{match.root.name} has stride {stride}, more than its kernel {kernel}" if wide else None


@predicate("several-channels")
def why_not_several_channels(match: Match) -> str | None:
    """A convolution that is not depthwise: it sums over channels."""
    weight = tensor_type(match["w"])
    if weight is None:
        return "the shape of the weight is unknown"
    return f"{match.node('w').name} is {weight}: each output has one channel" if weight.shape[1] == 1 else None


@predicate("several-inputs")
def why_not_several_inputs(match: Match) -> str | None:
    """At least two different tensors are concatenated."""
    return None if len(set(match["xs"])) > 1 else f"{match.root.name} joins a single tensor"
