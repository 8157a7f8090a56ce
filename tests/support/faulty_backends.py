"""A good backend, and small edits of it that are each wrong in one way, with the row that must say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quantc.annotate.quantizer import Backend
from quantc.ir.decisions import Fixed, Quantize
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.operand_patterns import const
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Match
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.capability import Capability
from quantc.spec.formats import DType, Offer, PerChannel, Role, Scheme, Timing
from quantc.spec.spec import INT8, INT8_WEIGHT, INT8_WEIGHT_ONLY, INT32_BIAS, UINT8, UINT8_TOKEN, QuantSpec
from quantc.testing import Check

QDQ = frozenset({"qdq"})
BOTH = frozenset({"qdq", "integer"})
OWN = {"x": "act", "out": "act"}
MOVED = {"x": "pass", "out": "like x"}
PRODUCT = {"x": "act", "w": "weight", "b": "bias", "out": "act?"}
TRANSPOSED = INT8_WEIGHT.but(granularity=PerChannel(axis=1))

RUN_TIME = Capability(
    role=Role.ACT, dtypes=(DType.UINT8,), granularities=("per-tensor", "per-token"), timings=(Timing.DYNAMIC,)
)

GOOD = Backend(
    "good",
    RuleTable(
        "good",
        (
            Rule("conv", aten.conv("x", const("w"), const("b?")) >> optional(aten.clamp), PRODUCT, supports=BOTH),
            Rule(
                "conv-transpose",
                aten.conv_transpose("x", const("w"), const("b?")).having(groups=1),
                {"x": "act", "w": "transposed", "out": "act"},
                supports=QDQ,
            ),
            Rule("linear", aten.linear("x", const("w"), const("b?")), PRODUCT, supports=QDQ, dynamic=Offer.YES),
            Rule(
                "matmul",
                aten.matmul,
                {"x": "act", "y": "act", "out": "act"},
                supports=QDQ,
                dynamic=Offer.NAMED,
            ),
            Rule("add", aten.add >> optional(aten.relu), {"x": "act", "y": "act", "out": "act"}, supports=BOTH),
            Rule("cat", aten.cat, {"xs": "act", "out": "like xs"}, supports=QDQ),
            Rule("max-pool", aten.max_pool, MOVED, supports=QDQ),
            Rule("reshape", aten.reshape, MOVED, supports=BOTH),
            Rule("sigmoid", aten.sigmoid, {"x": "act", "out": "unit"}, supports=BOTH),
            Rule("tanh", aten.tanh, {"x": "act", "out": "signed-unit"}, supports=QDQ),
        ),
    ),
    roles={
        "act": UINT8,
        "weight": INT8_WEIGHT,
        "transposed": TRANSPOSED,
        "bias": INT32_BIAS,
        "unit": Fixed(1 / 256, 0, UINT8),
        "signed-unit": Fixed(1 / 128, 128, UINT8),
    },
    takes=(
        Capability(role=Role.ACT, dtypes=(DType.UINT8,)),
        Capability(
            role=Role.WEIGHT,
            dtypes=(DType.INT8,),
            schemes=(Scheme.SYMMETRIC,),
            granularities=("per-tensor", "per-channel"),
        ),
        Capability(role=Role.BIAS, dtypes=(DType.INT32,), schemes=(Scheme.SYMMETRIC,)),
        RUN_TIME,
        Capability(
            role=Role.WEIGHT,
            dtypes=(DType.INT8, DType.INT4),
            granularities=("per-channel", "per-group"),
            timings=(Timing.WEIGHT_ONLY,),
        ),
    ),
    modes={"dynamic": UINT8_TOKEN, "weight-only": INT8_WEIGHT_ONLY},
    summary="ten rules that are right",
)


@dataclass(frozen=True)
class Faulty:
    """A backend with one fault: the rule and check that must fail, and words that must be in what it says."""

    name: str
    backend: Backend
    rule: str
    check: Check
    says: str
    also: tuple[str, ...] = ()
    """Other rules that have the same fault."""


def _roles(**roles: QuantSpec | Quantize | Fixed) -> Backend:
    """The good backend with other roles, by their names with underscores."""
    named = {name.replace("_", "-"): role for name, role in roles.items()}
    return replace(GOOD, roles={**GOOD.roles, **named})


def with_rule(name: str, change: Callable[[Rule], Rule]) -> Backend:
    rules = tuple(change(rule) if rule.name == name else rule for rule in GOOD.table)
    return replace(GOOD, table=replace(GOOD.table, rules=rules))


def _with_roles(name: str, roles: dict[str, str]) -> Backend:
    return with_rule(name, lambda rule: replace(rule, roles=roles))


def plus(*rules: Rule, first: bool = False) -> Backend:
    all_rules = (*rules, *GOOD.table) if first else (*GOOD.table, *rules)
    return replace(GOOD, table=replace(GOOD.table, rules=all_rules))


def _free(backend: Backend) -> Backend:
    """Takes whatever its own roles say, and nothing but static scales."""
    rules = tuple(replace(rule, dynamic=Offer.NO) for rule in backend.table)
    return replace(backend, takes=(), modes={}, table=replace(backend.table, rules=rules))


@predicate("test-never")
def why_not_ever(match: Match) -> str | None:
    return "it is never wanted"


@predicate("test-only-once")
def why_not_again(match: Match) -> str | None:
    text = match.program.dump()
    if text in _SEEN:
        return "it was wanted once"
    _SEEN.add(text)
    return None


_SEEN: set[str] = set()


@predicate("test-writes")
def why_not_with_writing(match: Match) -> str | None:
    weight = match.program.tensor(match.node("w"))
    if weight is not None:
        with torch.no_grad():
            weight.add_(1.0)
    return None


def _unregistered(match: Match) -> str | None:
    return None


FAULTY: tuple[Faulty, ...] = (
    Faulty(
        "wrong-axis",
        _roles(weight=TRANSPOSED),
        "conv",
        Check.CHANNELS,
        "each of which goes into every output",
        ("linear",),
    ),
    Faulty(
        "wrong-axis-of-transposed-conv",
        _roles(transposed=INT8_WEIGHT),
        "conv-transpose",
        Check.CHANNELS,
        "along axis 0",
    ),
    Faulty(
        "weight-as-bias",
        _with_roles("linear", {**PRODUCT, "w": "bias"}),
        "linear",
        Check.OPERANDS,
        "role of kind bias",
    ),
    Faulty(
        "weight-like-input",
        _with_roles("linear", {**PRODUCT, "w": "like x"}),
        "linear",
        Check.OPERANDS,
        "w is the weight of linear, and has the scale of x",
    ),
    Faulty("wrong-zero-point", _roles(unit=Fixed(1 / 256, 128, UINT8)), "sigmoid", Check.RANGE, "-0.5 to 0.496"),
    Faulty("unsigned-for-signed", _roles(signed_unit=Fixed(1 / 128, 0, UINT8)), "tanh", Check.RANGE, "from 0 to"),
    Faulty("range-too-small", _roles(unit=Fixed(1 / 512, 0, UINT8)), "sigmoid", Check.RANGE, "0 to 0.498"),
    Faulty("range-too-wide", _roles(unit=Fixed(0.25, 0, UINT8)), "sigmoid", Check.FIDELITY, "SQNR"),
    Faulty(
        "symmetric-off-centre",
        _free(_roles(signed_unit=Fixed(1 / 64, 3, INT8.but(scheme=Scheme.SYMMETRIC)))),
        "tanh",
        Check.ZERO,
        "its zero point is 3",
    ),
    Faulty("cat-does-not-share", _with_roles("cat", {"xs": "act", "out": "act"}), "cat", Check.SHARING, "only moves"),
    Faulty("pool-does-not-share", _with_roles("max-pool", OWN), "max-pool", Check.SHARING, "only moves values"),
    Faulty("reshape-requantizes", _with_roles("reshape", OWN), "reshape", Check.SHARING, "reshape only moves"),
    Faulty(
        "passed-on-with-its-own-spec",
        _with_roles("max-pool", {"x": "pass", "out": "act"}),
        "max-pool",
        Check.SHARING,
        "requantizes",
    ),
    Faulty(
        "dtype-it-does-not-take", _roles(act=INT8), "", Check.SPECS, "dtype must be uint8, not int8", GOOD.table.names
    ),
    Faulty(
        "weights-affine-and-unsigned",
        _roles(weight=INT8_WEIGHT.but(dtype=DType.UINT8, scheme=Scheme.AFFINE)),
        "",
        Check.SPECS,
        "dtype must be int8, not uint8; scheme must be symmetric",
        ("conv", "linear"),
    ),
    Faulty(
        "activations-by-channel",
        _free(_roles(act=UINT8.but(granularity=PerChannel(axis=1)))),
        "",
        Check.SPECS,
        "a scale for each channel",
        GOOD.table.names,
    ),
    Faulty(
        "narrow-bias",
        _free(_roles(bias=INT32_BIAS.but(dtype=DType.INT16))),
        "",
        Check.SPECS,
        "16 bits",
        ("conv", "linear"),
    ),
    Faulty(
        "weight-that-is-computed",
        _with_roles("matmul", {"x": "act", "y": "weight", "out": "act"}),
        "matmul",
        Check.TAKEN,
        "must be a constant",
    ),
    Faulty(
        "weight-as-activation", _with_roles("linear", {"x": "act", "w": "act"}), "linear", Check.OPERANDS, "kind act"
    ),
    Faulty(
        "bias-as-activation",
        _with_roles("linear", {"x": "act", "w": "weight", "b": "act"}),
        "linear",
        Check.OPERANDS,
        "is the bias of linear",
    ),
    Faulty(
        "bias-of-nothing",
        _with_roles("linear", {"w": "weight", "b": "bias"}),
        "linear",
        Check.PLACED,
        "b has the role 'bias' and stays float",
    ),
    Faulty("like-the-weight", _with_roles("linear", {**PRODUCT, "out": "like w"}), "linear", Check.RUNS, ""),
    Faulty(
        "product-like-its-input",
        _with_roles("matmul", {"x": "act", "y": "act", "out": "like x"}),
        "matmul",
        Check.SHARING,
        "when the other operands grow",
    ),
    Faulty(
        "linear-like-its-input", _with_roles("linear", {**PRODUCT, "out": "like x"}), "linear", Check.SHARING, "grow"
    ),
    Faulty(
        "dead-rule",
        plus(Rule("linear-too", aten.linear("x", const("w"), const("b?")), PRODUCT, supports=QDQ)),
        "linear-too",
        Check.TAKEN,
        "the rule is dead: linear takes everything",
    ),
    Faulty(
        "dead-because-it-is-fused-before",
        plus(Rule("conv-bn", aten.conv("x", const("w")) >> aten.batch_norm.having(training=False), OWN, supports=QDQ)),
        "conv-bn",
        Check.TAKEN,
        "conv takes everything",
    ),
    Faulty(
        "no-level", with_rule("add", lambda rule: replace(rule, supports=frozenset())), "add", Check.SUPPORTS, "says"
    ),
    Faulty(
        "integer-form-that-is-not-there",
        plus(Rule("wave", op("sin", args="x"), OWN, supports=BOTH)),
        "wave",
        Check.INTEGER_FORM,
        "claims the integer form, and sin stays in float: it has no integer form",
    ),
    Faulty(
        "integers-to-be-quantized",
        plus(Rule("largest", op("aten.argmax.default", args="x"), OWN, supports=QDQ)),
        "largest",
        Check.TAKEN,
        "only float32 tensors",
    ),
    Faulty(
        "weight-scales-too-large", _roles(weight=INT8_WEIGHT.but(eps=0.25)), "linear", Check.FIDELITY, "SQNR", ("conv",)
    ),
    Faulty(
        "activation-scales-too-large", _roles(act=UINT8.but(eps=1.0)), "add", Check.FIDELITY, "SQNR", GOOD.table.names
    ),
    Faulty("unused-role", _roles(spare=UINT8), "", Check.ROLES, "no rule uses the role 'spare'"),
    Faulty(
        "condition-without-a-name",
        with_rule("add", lambda rule: replace(rule, when=_unregistered)),
        "",
        Check.JSON,
        "JSON",
    ),
    Faulty(
        "op-without-example",
        plus(Rule("odd", op("aten.index_add.default", args="x"), OWN, supports=QDQ)),
        "odd",
        Check.MODELS,
        "no example arguments for aten.index_add.default",
    ),
    Faulty(
        "condition-that-refuses-all",
        with_rule("add", lambda rule: replace(rule, when="test-never")),
        "add",
        Check.TAKEN,
        "refuses every model made for it: it is never wanted",
    ),
    Faulty(
        "condition-with-a-memory",
        with_rule("tanh", lambda rule: replace(rule, when="test-only-once")),
        "tanh",
        Check.REPEATABLE,
        "two plans",
    ),
    Faulty(
        "condition-that-writes",
        with_rule("linear", lambda rule: replace(rule, when="test-writes")),
        "linear",
        Check.FIDELITY,
        "SQNR",
    ),
)
