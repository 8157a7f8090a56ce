"""x86: fbgemm and onednn kernels. Activations uint8 affine per tensor, weights int8 symmetric per channel.

Convs and matmuls read quantized tensors and yield float; the next one quantizes its input. So residual sums, norms and
softmax compute in float. Matmuls of two activations do so too, unless a config names them: there is no kernel for
batched 8-bit matmul, and both factors would be rounded for nothing. Value-preserving ops between two convs or matmuls
run on uint8 if all their users want that; elementwise sums, products and averages compute on operands that are already
quantized, but add no rounding of their own.
"""

from __future__ import annotations

from quantc.annotate.quantizer import Backend
from quantc.backends import rules
from quantc.backends.rules import product, rule
from quantc.backends.support_claims import on_kernels
from quantc.ir.dialect import ops_in
from quantc.ir.op_row import Family
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.table import RuleTable
from quantc.spec.formats import Offer

after_conv = op("relu", "clamp", "hardswish", "silu", args="_")
after_linear = op(*ops_in(Family.ACTIVATION), args="_")
both = {"x": "act", "y": "act", "out": "act?"}
combined = {"x": "pass", "y": "pass", "out": "act?"}
reduced = {"x": "pass", "out": "act?"}

TABLE = RuleTable(
    "x86",
    (
        rule(
            "conv-add",
            aten.add(rules.conv, "y") >> optional(op("relu", "clamp", args="_")),
            {**product("act?"), "y": "act"},
            when=("same-shape",),
        ),
        rule("conv", rules.conv >> optional(after_conv), product("act?")),
        rule(
            "conv-transpose",
            rules.conv_transpose >> optional(after_conv),
            product("act?", "weight-transposed"),
        ),
        rule(
            "conv-transpose-grouped",
            rules.conv_transpose_grouped >> optional(after_conv),
            product("act?", "weight-whole"),
        ),
        rule("linear-add", aten.add(rules.linear, "y") >> optional(aten.relu), product("act?")),
        rule("linear-prelu", rules.linear >> aten.prelu("_", "_"), product("act?")),
        rule("linear", rules.linear >> optional(after_linear), product("act?")),
        rule("linear-computed", rules.linear_computed, {"x": "act", "w": "act", "out": "act?"}, static=Offer.NAMED),
        rule("matmul-constant", rules.matmul_constant, product("act?", "weight-transposed")),
        rule("addmm-constant", rules.addmm_constant, product("act?", "weight-transposed")),
        rule("matmul", aten.matmul, both, static=Offer.NAMED),
        rule("addmm", rules.addmm, both, static=Offer.NAMED),
        rule("baddbmm", rules.baddbmm, both, static=Offer.NAMED),
        *rules.LOOKUPS,
        *rules.RECURRENT,
        *rules.MOVES,
        *rules.WITHIN,
        rule("average", rules.average, reduced),
        rule("upsample-linear", aten.upsample_linear, reduced),
        rule("cat", aten.cat, rules.PASS_ON_LIST),
        rule("stack", aten.stack, rules.PASS_ON_LIST),
        rule("add", aten.add >> optional(aten.relu), combined),
        rule("sub", aten.sub >> optional(aten.relu), combined),
        rule("mul", aten.mul >> optional(aten.relu), combined),
        rule("sum", aten.total, reduced),
    ),
)

X86 = Backend(
    "x86",
    on_kernels(TABLE),
    roles={"act": rules.ACT, **rules.WEIGHT_ROLES},
    takes=rules.TAKES,
    # sums of two products fit 16 bits if activations have 7
    modes={**rules.MODES, "dynamic": rules.MODES["dynamic"].but(qmax=127)},
    before=rules.taken_apart(Offer.NAMED),
    instruction_set="avx2",
    summary="Kernels of fbgemm and onednn: products read uint8 and yield float, which the next product quantizes.",
)
