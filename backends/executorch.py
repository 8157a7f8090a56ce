"""ExecuTorch's XNNPACK delegate. Activations int8 affine per tensor, weights int8 symmetric -127..127 per channel.

The table lists only ops that the delegate takes in quantized form; it needs every operand and result quantized, weights
and biases constant, and scales of at least 2^-12. With dynamic quantization it takes linear layers and convolutions of
images, except depthwise ones.
"""

from __future__ import annotations

from dataclasses import replace

from quantc.annotate.quantizer import Backend
from quantc.backends import rules
from quantc.backends.rules import product, rule
from quantc.backends.support_claims import in_delegate
from quantc.backends.wide_ranges import NARROW
from quantc.passes.duplicate_dq import DuplicateDq
from quantc.passes.split_mean import SplitMean
from quantc.patterns import aten
from quantc.patterns.checks import one_of
from quantc.patterns.dsl import any_of, op, optional
from quantc.patterns.operand_patterns import const, value
from quantc.patterns.table import RuleTable
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Offer, PerChannel, Role, Scheme, Timing
from quantc.spec.spec import FLOAT32_EPS, INT8, INT8_NARROW_WEIGHT, INT8_TOKEN, INT8_WEIGHT_ONLY

SMALLEST_SCALE = 2.0**-12
ACT = INT8.but(observe="mse")
WEIGHT = INT8_NARROW_WEIGHT.but(eps=SMALLEST_SCALE)

after = op("relu", "clamp", args="_")
both = {"x": "act", "y": "act", "out": "act"}
summed = {"x": "pass", "y": "pass", "out": "act?"}
"""A sum of quantized tensors with quantized readers. The residual stream of a transformer, which norms read, is float: rounding
it after every layer gains no time, and costs 6 to 7 dB."""
image, signal = value("x", rank=4), value("x", rank=3)
"""A batch of them: the delegate takes no single ones."""
conv_2d = op("conv2d", args="x")(image, const("w"), const("b?"))
conv = any_of(conv_2d, op("conv1d", args="x")(signal, const("w"), const("b?")))
conv_transpose = op("conv_transpose2d", args="x")(image, const("w"), const("b?"))
linear = aten.linear("x", const("w"), const("b?"))
over_image = one_of((2, 3), (3, 2), (-1, -2), (-2, -1))

_RULES = RuleTable(
    "executorch",
    (
        rule("conv", conv_2d >> optional(after), product("act"), when=("several-channels",)),
        rule("conv-static", conv >> optional(after), product("act")),
        rule(
            "conv-transpose",
            conv_transpose.having(groups=1) >> optional(after),
            product("act", "weight-transposed"),
        ),
        rule("linear", linear >> optional(after), product("act")),
        rule("add-images", aten.add(image, value("y", rank=4)) >> optional(aten.relu), both, when=(NARROW,)),
        rule("add", aten.add(value("x", rank=(1, 2, 3, 5))) >> optional(aten.relu), summed, when=(NARROW,)),
        rule("sub", aten.sub, both, when=(NARROW,)),
        rule("mul", aten.mul, both, when=(NARROW,)),
        rule("cat", aten.cat, {"xs": "act", "out": "like xs"}, when=("several-inputs", NARROW)),
        rule("max-pool", op("max_pool2d", args="x")(image), rules.PASS_ON, when=("stride-within-kernel",)),
        rule("adaptive-avg-pool", op("adaptive_avg_pool2d", args="x")(image).having(output_size=1), rules.PASS_ON),
        rule("mean", aten.mean(image).having(dim=over_image, keepdim=True), rules.PASS_ON),
        rule("clamp", aten.clamp, rules.PASS_ON),
        rule("reshape", op(*aten.reshape.ops, *aten.squeeze.ops, args="x"), rules.PASS_ON),
        rule("transpose", aten.transpose, rules.PASS_ON),
        rule("slice", any_of(op("slice", args="x").having(step=1), op("select", "narrow", args="x")), rules.PASS_ON),
        rule("split", aten.part, rules.PASS_ON),
        rule("copy", aten.copy, rules.PASS_ON),
        rule("embedding", aten.embedding, {"w": "weight"}),
        *(replace(each, static=Offer.NO) for each in rules.RECURRENT if each.name in ("lstm", "gru", "rnn")),
    ),
)

TABLE = in_delegate(_RULES)

EXECUTORCH = Backend(
    "executorch",
    TABLE,
    roles={"act": ACT, "weight": WEIGHT, "weight-transposed": WEIGHT.but(granularity=PerChannel(axis=1))},
    takes=(
        Capability(role=Role.ACT, dtypes=(DType.INT8,), min_eps=SMALLEST_SCALE),
        Capability(
            role=Role.ACT,
            dtypes=(DType.INT8,),
            schemes=(Scheme.AFFINE,),
            granularities=("per-tensor", "per-token"),
            timings=(Timing.DYNAMIC,),
        ),
        Capability(
            role=Role.WEIGHT,
            dtypes=(DType.INT8,),
            schemes=(Scheme.SYMMETRIC,),
            granularities=("per-tensor", "per-channel"),
            qmin=-127,
            min_eps=SMALLEST_SCALE,
        ),
        Capability(
            role=Role.WEIGHT,
            dtypes=(DType.INT4,),
            schemes=(Scheme.SYMMETRIC,),
            granularities=("per-channel", "per-group"),
        ),
        Capability(
            role=Role.WEIGHT,
            dtypes=(DType.INT8, DType.INT4),
            granularities=("per-tensor", "per-channel", "per-group"),
            timings=(Timing.WEIGHT_ONLY,),
        ),
    ),
    modes={
        "dynamic": INT8_TOKEN.but(eps=FLOAT32_EPS),  # the delegate quantizes row by row
        "weight-only": INT8_WEIGHT_ONLY.but(qmin=-127),
    },
    before=(SplitMean(),),  # the delegate averages images where the result is an image again
    after=(DuplicateDq(),),  # the delegate takes an op together with the dequantize ops before it
    instruction_set="neon-mlal",
    summary="ExecuTorch's XNNPACK delegate: only what it takes in quantized form.",
)
