"""x86: fbgemm and onednn kernels. Activations uint8 affine per tensor, weights int8 symmetric per channel.

Products read quantized tensors and yield float; the next product quantizes what it reads. So residual sums, norms and
softmax work in float. Products of two activations do so too, unless a config names them: there is no kernel for batches
of matrices of bytes, and both factors would be rounded for nothing. What only moves values between two products does so on uint8 if that is what all who read it
want; sums, products and averages of elements compute on what comes quantized, but round nothing for their own sake.
"""

from __future__ import annotations

from quantc.annotate.quantizer import Backend
from quantc.backends import parts
from quantc.backends.claims import on_kernels
from quantc.backends.parts import product, rule
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.table import RuleTable
from quantc.spec.formats import Offer

after_conv = op("relu", "clamp", "hardswish", "silu", args="_")
after_linear = op("relu", "clamp", "hardswish", "silu", "gelu", "leaky_relu", "tanh", "sigmoid", "elu", args="_")
both = {"x": "act", "y": "act", "out": "act?"}
combined = {"x": "pass", "y": "pass", "out": "act?"}
reduced = {"x": "pass", "out": "act?"}

TABLE = RuleTable(
    "x86",
    (
        rule(
            "conv-add",
            aten.add(parts.conv, "y") >> optional(op("relu", "clamp", args="_")),
            {**product("act?"), "y": "act"},
            when=("same-shape",),
        ),
        rule("conv", parts.conv >> optional(after_conv), product("act?")),
        rule(
            "conv-transpose",
            parts.conv_transpose >> optional(after_conv),
            product("act?", "weight-transposed"),
        ),
        rule(
            "conv-transpose-grouped",
            parts.conv_transpose_grouped >> optional(after_conv),
            product("act?", "weight-whole"),
        ),
        rule("linear-add", aten.add(parts.linear, "y") >> optional(aten.relu), product("act?")),
        rule("linear-prelu", parts.linear >> aten.prelu("_", "_"), product("act?")),
        rule("linear", parts.linear >> optional(after_linear), product("act?")),
        rule("linear-computed", parts.linear_computed, {"x": "act", "w": "act", "out": "act?"}, static=Offer.NAMED),
        rule("matmul-constant", parts.matmul_constant, product("act?", "weight-transposed")),
        rule("addmm-constant", parts.addmm_constant, product("act?", "weight-transposed")),
        rule("matmul", aten.matmul, both, static=Offer.NAMED),
        rule("addmm", parts.addmm, both, static=Offer.NAMED),
        rule("baddbmm", parts.baddbmm, both, static=Offer.NAMED),
        *parts.LOOKUPS,
        *parts.RECURRENT,
        *parts.MOVES,
        *parts.WITHIN,
        rule("average", parts.average, reduced),
        rule("upsample-linear", aten.upsample_linear, reduced),
        rule("cat", aten.cat, parts.PASS_ON_LIST),
        rule("stack", aten.stack, parts.PASS_ON_LIST),
        rule("add", aten.add >> optional(aten.relu), combined),
        rule("sub", aten.sub >> optional(aten.relu), combined),
        rule("mul", aten.mul >> optional(aten.relu), combined),
        rule("sum", aten.total, reduced),
    ),
)

X86 = Backend(
    "x86",
    on_kernels(TABLE),
    roles={"act": parts.ACT, **parts.WEIGHT_ROLES},
    takes=parts.TAKES,
    # sums of two products fit 16 bits if activations have 7
    modes={**parts.MODES, "dynamic": parts.MODES["dynamic"].but(qmax=127)},
    before=parts.taken_apart(Offer.NAMED),
    instruction_set="avx2",
    summary="Kernels of fbgemm and onednn: products read uint8 and yield float, which the next product quantizes.",
)
