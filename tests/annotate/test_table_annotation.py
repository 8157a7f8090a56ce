"""The rules of a backend on a program: what reads and yields quantized tensors, what follows, and what stays float."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.table_annotation import TableAnnotation
from quantc.errors import AnnotationError
from quantc.ir.decisions import Derived
from quantc.ir.plan import Part
from quantc.ir.program import Program
from quantc.patterns import aten
from quantc.patterns.dsl import optional
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.capability import Capability
from quantc.spec.formats import Offer, PerChannel, Timing
from quantc.spec.spec import INT8_WEIGHT, INT8_WEIGHT_ONLY, INT16, INT32_BIAS, UINT8, UINT8_DYNAMIC
from tests.support.hand_quantizers import annotated, decisions
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL

ACT, WEIGHT = "quantize as UINT8", "quantize as INT8_WEIGHT"
LINEAR_RELU = Rule(
    "linear-relu",
    aten.linear("x", const("w"), const("b?")) >> optional(aten.relu),
    {"x": "act", "w": "weight", "b": "bias", "out": "act"},
    dynamic=Offer.YES,
)
FULL = qc.Backend(
    "full",
    RuleTable("full", (LINEAR_RELU, Rule("reshape", aten.reshape, {"x": "pass", "out": "like x"}))),
    roles={"act": UINT8, "weight": INT8_WEIGHT, "bias": INT32_BIAS},
    takes=tuple(map(Capability.of, (UINT8, INT8_WEIGHT, UINT8_DYNAMIC, INT8_WEIGHT_ONLY))),
)
"""Takes a linear layer with its relu statically, dynamically, and by its weight alone."""


def convolved(build: Build, x: fx.Node, name: str) -> fx.Node:
    return build("conv2d", x, build.const(f"w_{name}", 2, 2, 1, 1), None, name=name)


def reasons(program: Program) -> dict[str, str]:
    return {node.name: reason for node, reason in program.plan.left_float.rows.items()}


def test_a_rule_decides_what_its_names_stand_for_and_claims_its_nodes() -> None:
    build = Build()
    linear = build("linear", build.input("x", 2, 4), build.const("w", 3, 4), build.const("b", 3))
    program = annotated(build.done(linear), SMALL)
    # the rule gives the bias no role
    assert decisions(program) == {"linear:in0": ACT, "linear:in1": WEIGHT, "linear:out0": ACT}
    claim = program.plan.claims[linear]
    assert (claim.quantizer, claim.rule, claim.root, claim.part) == ("small", "linear", "linear", Part.QUANTIZED)


def test_a_bias_is_derived_from_the_factors() -> None:
    build = Build()
    linear = build("linear", build.input("x", 2, 4), build.const("w", 3, 4), build.const("b", 3))
    program = annotated(build.done(build("relu", linear)), FULL)
    outcomes = {str(site): outcome for site, outcome in program.plan.outcomes.items()}
    derived = outcomes["linear:in2"]
    assert isinstance(derived, Derived)
    assert [str(site) for site in derived.sites] == ["linear:in0", "linear:in1"]
    assert "relu:out0" in outcomes
    assert "linear:out0" not in outcomes


def test_the_members_of_a_list_and_the_result_share_the_scale_of_the_first() -> None:
    build = Build()
    x, y = build.input("x", 2, 4), build.input("y", 2, 4)
    program = annotated(build.done(build("cat", [x, y], 1)), SMALL)
    assert decisions(program) == {"cat:in0": ACT, "cat:in1": "same as cat:in0", "cat:out0": "same as cat:in0"}


def test_members_of_a_list_that_the_config_sets_apart_are_refused() -> None:
    build = Build()
    x, y = build.input("x", 2, 4), build("neg", build.input("y", 2, 4))
    program = build.done(build("cat", [x, y], 1))
    with pytest.raises(AnnotationError, match="cat gives its inputs one scale") as caught:
        annotated(program, SMALL, qc.QuantConfig().set_edge("neg", "cat", UINT8.but(qmax=127)))
    assert "cat:in0" in caught.value.what
    assert "cat:in1" in caught.value.what


# -- what follows --------------------------------------------------------------------------------------------------


def pooled(*, read_in_float: bool) -> tuple[Program, fx.Node]:
    """conv, max pool, conv; the result of the pool may be an output too."""
    build = Build()
    first = convolved(build, build.input("x", 1, 2, 4, 4), "first")
    pool = build("max_pool2d", first, [2, 2])
    last = convolved(build, pool, "last")
    return annotated(build.done(last, *([pool] if read_in_float else [])), SMALL), pool


def test_a_move_between_two_that_compute_is_quantized_before_it() -> None:
    program, pool = pooled(read_in_float=False)
    found = decisions(program)
    assert found["max_pool2d:in0"] == ACT
    assert found["max_pool2d:out0"] == "same as max_pool2d:in0"
    assert program.plan.claims[pool].part is Part.PROPAGATED


def test_a_move_that_something_reads_in_float_is_left_float() -> None:
    program, pool = pooled(read_in_float=True)
    assert pool not in program.plan.claims
    assert "not all that reads its result wants it quantized" in reasons(program)["max_pool2d"]
    assert "max_pool2d:in0" not in decisions(program)
    assert decisions(program)["last:in0"] == ACT


def test_a_follower_of_a_decided_output_has_its_scale() -> None:
    build = Build()
    sigmoid = build("sigmoid", build.input("x", 2, 4))
    program = annotated(build.done(build("reshape", sigmoid, [8])), SMALL)
    found = decisions(program)
    assert found["reshape:in0"] == "same as sigmoid:out0"
    assert found["reshape:out0"] == "same as reshape:in0"


def test_a_follower_of_a_float_says_whose() -> None:
    build = Build()
    program = annotated(build.done(build("reshape", build.input("x", 2, 4), [8])), SMALL)
    assert reasons(program) == {"reshape": "reshape: its input x is not quantized"}
    assert decisions(program) == {}


# -- techniques ----------------------------------------------------------------------------------------------------


def linear_relu_reshape() -> tuple[Program, list[fx.Node]]:
    build = Build()
    linear = build("linear", build.input("x", 2, 4), build.const("w", 3, 4), build.const("b", 3))
    relu = build("relu", linear)
    return build.done(build("reshape", relu, [6])), [linear, relu]


def test_a_dynamic_op_is_claimed_alone_and_what_follows_is_float() -> None:
    program, (linear, relu) = linear_relu_reshape()
    annotated(program, FULL, qc.QuantConfig().set_all(UINT8_DYNAMIC))
    assert decisions(program) == {"linear:in0": "quantize as UINT8_DYNAMIC", "linear:in1": WEIGHT}
    assert program.plan.claims[linear].timing is Timing.DYNAMIC
    assert relu not in program.plan.claims
    assert reasons(program)["relu"] == "linear before it is dynamic and yields float"


def test_a_weight_only_op_quantizes_its_weight_alone() -> None:
    program, (linear, relu) = linear_relu_reshape()
    annotated(program, FULL, qc.QuantConfig().set_all(INT8_WEIGHT_ONLY))
    quantized = {place for place, outcome in decisions(program).items() if outcome.startswith("quantize")}
    assert quantized == {"linear:in1"}
    assert program.plan.claims[linear].timing is Timing.WEIGHT_ONLY
    assert relu not in program.plan.claims


def test_a_spec_that_the_backend_cannot_run_is_refused_after_all_places_are_known() -> None:
    build = Build()
    x = build.input("x", 2, 4)
    first, second = build("sigmoid", x), build("add", x, x)
    program = build.done(first, second)
    with pytest.raises(AnnotationError, match="cannot run INT16") as caught:
        annotated(program, SMALL, qc.QuantConfig().set_all(INT16))
    assert "sigmoid" in str(caught.value)
    assert "add" in str(caught.value)


# -- what may be matched -------------------------------------------------------------------------------------------


def test_a_weight_must_be_a_constant_with_the_axis_of_its_channels() -> None:
    rule = Rule("linear", aten.linear("x", "w"), {"x": "act", "w": "weight"})
    far = INT8_WEIGHT.but(granularity=PerChannel(axis=2))
    build = Build()
    x = build.input("x", 2, 4)
    computed = build("linear", x, build("neg", build.const("v", 3, 4)), None)
    constant = build("linear", x, build.const("w", 3, 4), None)
    program = build.done(computed, constant)
    for spec, says in (
        (INT8_WEIGHT, {computed: "neg is computed, and w must be a constant"}),
        (far, {computed: "neg is computed", constant: "w has 2 axes, and its channels are to lie on axis 2"}),
    ):
        backend = qc.Backend("one", RuleTable("one", (rule,)), {"act": UINT8, "weight": spec})
        admission = TableAnnotation(backend, Annotator(program)).admission
        for match in backend.table.match(program):
            reason = str(admission.why_not(match))
            assert says.get(match.root, "None") in reason


def test_an_op_that_reads_a_tensor_of_another_type_is_not_matched() -> None:
    build = Build()
    x = build.call(torch.ops.aten.neg.default, build.const("counts", 2, 4, dtype=torch.int64), name="counts_neg")
    add = build("add", x, x)
    program = annotated(build.done(add), SMALL)
    assert add not in program.plan.claims
