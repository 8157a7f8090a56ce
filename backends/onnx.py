"""ONNX Q/DQ for ONNX Runtime, OpenVINO and TensorRT. Activations uint8 affine per tensor, weights int8 symmetric per
channel; for TensorRT both are int8 and symmetric.

Runtimes match an op between DequantizeLinear and QuantizeLinear. Convolutions have integer kernels only if their result
is quantized, so it always is, and so are sums of such. Matmuls may yield float: the ops that follow them in
transformers (norms, softmax, residual sums) cost more in integers than they save, and would round for nothing.
Transposed convolutions are not listed: no CPU runtime has integer kernels for them.
"""

from __future__ import annotations

from dataclasses import replace

from quantc.annotate.quantizer import Backend
from quantc.backends import rules
from quantc.backends.rules import product, rule
from quantc.ir.dialect import is_op
from quantc.passes.snap_bias import SnapBias
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Match
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Offer, Role, Scheme, Timing
from quantc.spec.spec import FLOAT32_EPS, INT8, UINT8_DYNAMIC

after = op("relu", "clamp", args="_")
both = {"x": "act", "y": "act", "out": "act"}
combined = {"x": "pass", "y": "pass", "out": "act?"}
reduced = {"x": "pass", "out": "act?"}
WEIGHTS = {name: rules.WEIGHT_ROLES[name] for name in ("weight", "weight-transposed")}


@predicate("of-convolutions")
def why_not_of_convolutions(match: Match) -> str | None:
    """One side of a sum is the result of a convolution, an activation aside: it is an image, and quantized."""
    for name in ("x", "y"):
        source = match.node(name)
        while is_op(source, *aten.activation.ops):
            source = source.args[0]  # type: ignore[assignment]
        if is_op(source, *aten.conv.ops):
            return None
    return f"{match.root.name} adds nothing that a convolution yields"


RULES: tuple[Rule, ...] = (
    rule("conv", rules.conv >> optional(after), product("act")),
    rule("linear", rules.linear >> optional(after), product("act?")),
    rule("linear-computed", rules.linear_computed, {"x": "act", "w": "act", "out": "act?"}, static=Offer.NAMED),
    rule("matmul-constant", rules.matmul_constant, product("act?", "weight-transposed")),
    rule("addmm-constant", rules.addmm_constant, product("act?", "weight-transposed")),
    rule("matmul", aten.matmul, {**both, "out": "act?"}, static=Offer.NAMED),
    rule("embedding", aten.embedding, {"w": "weight"}),
    *rules.RECURRENT,
    *rules.MOVES,
    *rules.WITHIN,
    rule("average", rules.average, reduced),
    rule("cat", aten.cat, rules.PASS_ON_LIST),
    rule("stack", aten.stack, rules.PASS_ON_LIST),
    rule("add-convolutions", aten.add >> optional(after), both, when=("same-shape", "of-convolutions")),
    rule("add", aten.add >> optional(aten.relu), combined),
    rule("mul", aten.mul >> optional(aten.relu), combined),
)

TABLE = RuleTable("onnx", tuple(replace(each, supports=each.supports | {"onnx"}) for each in RULES))

ONNX = Backend(
    "onnx",
    TABLE,
    roles={"act": rules.ACT, **WEIGHTS},
    takes=(
        Capability(role=Role.ACT, dtypes=(DType.UINT8, DType.INT8, DType.INT16)),
        Capability(
            role=Role.ACT,
            dtypes=(DType.UINT8, DType.INT8),
            granularities=("per-tensor", "per-token"),
            timings=(Timing.DYNAMIC,),
        ),
        Capability(role=Role.WEIGHT, dtypes=(DType.INT8,), granularities=("per-tensor", "per-channel")),
        *rules.WEIGHT_ONLY,
    ),
    # DynamicQuantizeLinear has neither a smallest scale nor another range
    modes={"dynamic": UINT8_DYNAMIC.but(eps=FLOAT32_EPS), "weight-only": rules.MODES["weight-only"]},
    before=rules.taken_apart(Offer.NAMED),
    after=(SnapBias(),),  # kernels add biases to sums of integers
    instruction_set="avx2",
    summary="Q/DQ in ONNX, for ONNX Runtime: convolutions yield uint8, products of matrices float.",
)

OPENVINO = replace(ONNX, name="openvino", target="onnx", summary="Q/DQ in ONNX, as OpenVINO reads it best.")

SYMMETRIC = INT8.but(scheme=Scheme.SYMMETRIC, observe="mse")
TENSORRT = replace(
    ONNX,
    name="tensorrt",
    target="onnx",
    table=replace(TABLE, rules=tuple(replace(each, dynamic=Offer.NO) for each in TABLE)),
    roles={"act": SYMMETRIC, **WEIGHTS},
    takes=(
        Capability(role=Role.ACT, dtypes=(DType.INT8,), schemes=(Scheme.SYMMETRIC,)),
        Capability(
            role=Role.WEIGHT,
            dtypes=(DType.INT8,),
            schemes=(Scheme.SYMMETRIC,),
            granularities=("per-tensor", "per-channel"),
        ),
        *rules.WEIGHT_ONLY,
    ),
    modes={"weight-only": rules.MODES["weight-only"]},
    instruction_set="",
    summary="Q/DQ in ONNX for TensorRT: int8, symmetric, biases in float.",
)
