"""The decisions of quantizers: two about one place are refused, and what the config leaves float stays float."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import quantc as qc
from quantc.annotate.annotator import Annotator, Claim
from quantc.errors import AnnotationError
from quantc.ir.program import Program
from tests.support.hand_quantizers import ByHand, Deaf, X, prepared, two_linears
from tests.support.pattern_graphs import Build

aten = torch.ops.aten


def test_two_decisions_about_a_place_are_refused() -> None:
    _, program, _ = two_linears()

    def decide_again(annotator: Annotator, node: fx.Node) -> None:
        annotator.operand(node, 0, qc.Quantize(qc.UINT8))

    with pytest.raises(
        AnnotationError, match=r"two decisions about linear:in0: quantize as INT8, and .* UINT8"
    ) as told:
        qc.prepare(program, ByHand(then=decide_again))
    assert "linear" in str(told.value.where)
    assert told.value.advice


def test_the_same_decision_twice_is_one() -> None:
    _, program, _ = two_linears()
    prepared = qc.prepare(program, ByHand(then=lambda a, node: _ignore(a.operand(node, 0, qc.Quantize(qc.INT8)))))
    assert len(prepared.plan.outcomes) == 4


def _ignore(site: object) -> None:
    """For callbacks that yield nothing."""


def test_two_claims_on_a_node_are_refused() -> None:
    _, program, _ = two_linears()

    def claim_again(annotator: Annotator, node: fx.Node) -> None:
        annotator.claim([node], Claim("by-hand", "second", node.name))

    with pytest.raises(AnnotationError, match="linear is claimed twice: quantized by first of by-hand") as caught:
        qc.prepare(program, ByHand(then=claim_again))
    assert caught.value.advice == "let one of the quantizers leave it alone"


def test_an_operand_that_is_not_there_is_refused() -> None:
    _, program, _ = two_linears()

    def beyond(annotator: Annotator, node: fx.Node) -> None:
        annotator.operand(node, 7, qc.Quantize(qc.INT8))

    with pytest.raises(AnnotationError, match="linear has no operand 7") as caught:
        qc.prepare(program, ByHand(then=beyond))
    assert "it has 3" in str(caught.value.advice)


@pytest.mark.parametrize("select", ["2", "last", "op"])
def test_float_counts_for_quantizers_written_by_hand(select: str) -> None:
    config = qc.QuantConfig()
    config = {
        "2": config.set("2", qc.FLOAT),
        "last": config.set_node("linear_1", qc.FLOAT),
        "op": config.set_op("linear", qc.FLOAT).set("0", qc.INT8),
    }[select]
    made = prepared(Deaf(), config=config)
    rows = {row.node: row for row in made.coverage().rows}
    assert rows["linear"].verdict == "quantized"
    assert rows["linear_1"].verdict == "float"
    assert "as the config says" in rows["linear_1"].reason
    qc.calibrate(made, [X], progress="silent")
    program = qc.convert(made)
    last = program.node("linear_1")
    assert {str(node.target) for node in last.all_input_nodes if node.op == "get_attr"} == {"2.weight", "2.bias"}


def test_float_on_an_edge_counts_for_quantizers_written_by_hand() -> None:
    config = qc.QuantConfig().set_edge("relu", "linear_1", qc.FLOAT)
    made = prepared(Deaf(), config=config)
    places = {str(site) for site in made.plan.outcomes}
    assert "linear_1:in1" in places
    assert "linear_1:in0" not in places


# -- what can be quantized ---------------------------------------------------------------------------------------


def test_only_float32_of_a_known_type_can_be_quantized() -> None:
    build = Build()
    x, unknown = build.input("x", 2, 4), build.input("unknown")
    whole = build.const("whole", 4, dtype=torch.int64)
    both = build.call(aten.max.dim, x, 1)
    annotator = Annotator(build.done(x, unknown, whole, both))
    assert annotator.why_not_tensor(x) is None
    assert "dtype of unknown is unknown" in str(annotator.why_not_tensor(unknown))
    assert "whole is i64[4]" in str(annotator.why_not_tensor(whole))
    assert "only float32" in str(annotator.why_not_tensor(both))


def test_a_tensor_that_is_written_to_is_not_quantized_nor_read_by_what_is() -> None:
    build = Build()
    x, w, b = build.input("x", 2, 4), build.const("w", 3, 4), build.const("b", 3)
    build.call(aten.mul_.Scalar, b, 2.0, name="write")
    linear = build("linear", x, w, b)
    annotator = Annotator(build.done(linear))
    assert annotator.why_not_tensor(b) == "b is written to in place"
    assert annotator.why_not_read(linear) == "b is written to in place"
    assert annotator.why_not_tensor(w) is None


def test_what_is_written_by_the_op_itself_does_not_count() -> None:
    build = Build()
    x, mean, var = build.input("x", 2, 3), build.const("mean", 3), build.const("var", 3)
    norm = build("batch_norm", x, None, None, mean, var, True, 0.1, 1e-5, True)
    annotator = Annotator(build.done(norm))
    assert annotator.why_not_tensor(mean) is not None
    assert annotator.why_not_read(norm) is None


# -- what is left out ----------------------------------------------------------------------------------------------


def linear_and_relu() -> tuple[Program, fx.Node, fx.Node]:
    build = Build()
    linear = build("linear", build.input("x", 2, 4), build.const("w", 3, 4), None)
    relu = build("relu", linear)
    return build.done(relu), linear, relu


def test_nodes_claimed_before_and_nodes_told_to_be_float_are_left_out_with_the_reason() -> None:
    program, linear, relu = linear_and_relu()
    program.plan.claims[linear] = Claim("earlier", "linear", linear.name)
    config = qc.QuantConfig().set_op("relu", qc.FLOAT)
    annotator = Annotator(program, config.resolve(program))
    assert annotator.left_out == {
        linear: "quantized by linear of earlier",
        relu: "left float, as the config says: op relu: float: asked for",
    }
    assert annotator.told_float.keys() == {relu}


def test_a_node_with_one_float_role_is_not_left_out() -> None:
    program, linear, _ = linear_and_relu()
    config = qc.QuantConfig().set_op("linear", qc.FLOAT, role="weight")
    annotator = Annotator(program, config.resolve(program))
    assert annotator.told_float == {}
    site = annotator.operand(linear, 0, qc.Quantize(qc.INT8))
    assert annotator.plan.outcomes == {site: qc.Quantize(qc.INT8)}


def test_decisions_about_a_node_told_to_be_float_are_dropped() -> None:
    program, linear, _ = linear_and_relu()
    annotator = Annotator(program, qc.QuantConfig().set_op("linear", qc.FLOAT).resolve(program))
    annotator.claim([linear], Claim("by-hand", "first", linear.name))
    annotator.operand(linear, 0, qc.Quantize(qc.INT8))
    annotator.output(linear, qc.Quantize(qc.INT8))
    assert annotator.plan.outcomes == {}
    assert linear not in annotator.plan.claims
    assert "as the config says" in annotator.plan.left_float[linear]
