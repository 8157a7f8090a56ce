"""QNNPACK: int8 kernels for Arm and x86. Activations uint8 affine per tensor, weights int8 symmetric per channel.

Every op of the table yields a quantized tensor, so that whole regions compute on integers.
"""

from __future__ import annotations

from quantc.annotate.quantizer import Backend
from quantc.backends import rules
from quantc.backends.rules import product, rule
from quantc.backends.support_claims import on_kernels
from quantc.backends.wide_ranges import NARROW
from quantc.ir.dialect import RANGES, ops_in
from quantc.ir.op_row import Family
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.table import RuleTable
from quantc.spec.spec import UINT8

after = op("relu", "clamp", args="_")
alone = {"x": "act", "out": "act"}
both = {"x": "act", "y": "act", "out": "act"}
joined = {"xs": "act", "out": "like xs"}
smooth = op(*ops_in(Family.ACTIVATION, but=("relu", "clamp", *RANGES)), args="x")

TABLE = RuleTable(
    "qnnpack",
    (
        rule("conv", rules.conv >> optional(after), product("act")),
        rule("conv-transpose", rules.conv_transpose >> optional(after), product("act", "weight-transposed")),
        rule(
            "conv-transpose-grouped",
            rules.conv_transpose_grouped >> optional(after),
            product("act", "weight-whole"),
        ),
        rule("linear", rules.linear >> optional(after), product("act")),
        rule("linear-computed", rules.linear_computed >> optional(after), {"x": "act", "w": "act", "out": "act"}),
        rule("matmul-constant", rules.matmul_constant, product("act", "weight-transposed")),
        rule("addmm-constant", rules.addmm_constant, product("act", "weight-transposed")),
        rule("matmul", aten.matmul, both),
        rule("addmm", rules.addmm, both),
        rule("baddbmm", rules.baddbmm, both),
        *rules.LOOKUPS,
        *rules.RECURRENT,
        rule("add", aten.add >> optional(after), both, when=(NARROW,)),
        rule("sub", aten.sub >> optional(after), both, when=(NARROW,)),
        rule("mul", aten.mul >> optional(after), both, when=(NARROW,)),
        rule("add-number", rules.with_number(aten.add) >> optional(after), alone, when=(NARROW,)),
        rule("sub-number", rules.with_number(aten.sub) >> optional(after), alone, when=(NARROW,)),
        rule("sub-from-number", rules.with_number(aten.rsub) >> optional(after), alone, when=(NARROW,)),
        rule("mul-number", rules.with_number(aten.mul) >> optional(after), alone, when=(NARROW,)),
        rule("div-number", rules.with_number(aten.div) >> optional(after), alone, when=(NARROW,)),
        rule("cat", aten.cat, joined, when=(NARROW,)),
        rule("stack", aten.stack, joined, when=(NARROW,)),
        rule("activation", smooth, alone),
        rule("prelu", aten.prelu, alone),
        rule("sigmoid", op(*rules.ranged("unit"), args="x"), {"x": "act", "out": "unit"}),
        rule("tanh", aten.tanh, {"x": "act", "out": "signed-unit"}),
        rule("softmax", rules.softmax, {"x": "act", "out": "unit"}),
        rule("softmax-of-float", rules.softmax, {"out": "unit"}),
        rule("layer-norm", aten.layer_norm, alone),
        rule("group-norm", aten.group_norm, alone),
        rule("instance-norm", aten.instance_norm, alone),
        rule("rms-norm", aten.rms_norm, alone),
        rule("batch-norm", rules.batch_norm >> optional(aten.relu), alone),
        rule("sum", aten.total, alone, when=(NARROW,)),
        *rules.MOVES,
        *rules.WITHIN,
        rule("average", rules.image_average, rules.PASS_ON),
        rule("upsample-linear", aten.upsample_linear, rules.PASS_ON),
    ),
)

QNNPACK = Backend(
    "qnnpack",
    on_kernels(TABLE),
    roles={"act": rules.ACT, **rules.WEIGHT_ROLES, **rules.known_ranges(UINT8)},
    takes=rules.TAKES,
    modes=rules.MODES,
    before=rules.taken_apart(),
    instruction_set="neon",
    summary="Kernels of QNNPACK: every op reads and yields uint8.",
)
