"""The tables of a program's quantizer, tried again to learn why they left nodes alone."""

from __future__ import annotations

import torch
from torch import fx

import quantc as qc
from quantc.annotate.rule_trials import Trial, Trials
from quantc.ir.program import Program
from quantc.patterns import aten as patterns
from quantc.patterns.operand_patterns import const
from quantc.patterns.refusals import UnknownType, WrittenTo, WrongOperand, WrongType
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.formats import Offer, Timing
from quantc.spec.spec import INT8_WEIGHT, UINT8
from tests.support.hand_quantizers import LINEAR, TANH, ByHand, annotated, table
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL

aten = torch.ops.aten


def only_trial(program: Program) -> Trial:
    (trial,) = Trials(program).tables
    return trial


def test_members_of_members_are_listed_in_order_of_precedence() -> None:
    build = Build()
    program = annotated(
        build.done(build("tanh", build.input("x", 2, 4))),
        qc.Quantizers((qc.Quantizers((ByHand(name="a", takes="relu"), ByHand(name="b", takes="neg"))), ByHand())),
    )
    trials = Trials(program)
    assert trials.names == "a, b, by-hand"
    assert trials.tables == ()
    assert trials.operators == {"relu", "neg", "linear"}


def test_a_program_without_a_quantizer_has_no_trials() -> None:
    build = Build()
    trials = Trials(build.done(build("tanh", build.input("x", 2, 4))))
    assert (trials.members, trials.tables, trials.names) == ((), (), "")


def test_a_later_table_does_not_see_what_an_earlier_one_took() -> None:
    build = Build()
    tanh = build("tanh", build.input("x", 2, 4))
    first, second = table("first", TANH), table("second", TANH)
    trials = Trials(annotated(build.done(tanh), [first, second]))
    ours, theirs = trials.tables
    assert (ours.backend, theirs.backend) == (first, second)
    assert [match.root for match in ours.matches] == [tanh]
    assert list(theirs.matches) == []
    refusal = theirs.refusal(tanh)
    assert refusal is not None
    assert "quantized by tanh of first" in refusal.reason


def test_what_the_config_leaves_float_is_left_out() -> None:
    build = Build()
    tanh = build("tanh", build.input("x", 2, 4))
    program = annotated(build.done(tanh), table("one", TANH), qc.QuantConfig().set_op("tanh", qc.FLOAT))
    trials = Trials(program)
    assert trials.left_out.keys() == {tanh}
    assert list(only_trial(program).matches) == []


# -- refusals ------------------------------------------------------------------------------------------------------


def test_the_refusal_of_the_rule_that_came_furthest_is_the_nearest() -> None:
    build = Build()
    linear = build("linear", build.input("x", 2, 4), build.input("w", 3, 4), None)
    relu = build("relu", linear)
    chain = Rule("linear-relu", patterns.linear("x", const("w")) >> patterns.relu, LINEAR.roles)
    program = annotated(build.done(relu, build("neg", linear)), table("two", LINEAR, chain))
    trial = only_trial(program)
    nearest = trial.refusal(linear)
    assert nearest is not None
    assert nearest.rule.name in ("linear", "linear-relu")
    told = trial.refusals(linear)
    assert {refusal.rule.name for refusal in told} == {"linear", "linear-relu"}
    assert [refusal.progress for refusal in told] == sorted((refusal.progress for refusal in told), reverse=True)
    assert trial.refusal(next(iter(neg for neg in linear.users if neg.name == "neg"))) is None  # no rule mentions it


def linear_of(build: Build, x: fx.Node, w: fx.Node) -> fx.Node:
    return build("linear", x, w, None)


ANY_WEIGHT = table("any", Rule("linear", patterns.linear("x", "w"), {"x": "act", "w": "weight"}))


def cause(build: Build, node: fx.Node, backend: qc.Backend = ANY_WEIGHT) -> object:
    refusal = only_trial(annotated(build.done(node), backend)).refusal(node)
    assert refusal is not None
    return refusal.cause


def test_the_tensor_that_an_objection_is_about_is_named() -> None:
    build = Build()
    unknown = build.input("unknown")
    found = cause(build, linear_of(build, unknown, build.const("w", 3, 4)))
    assert isinstance(found, UnknownType)
    assert found.value is unknown
    build = Build()
    whole = build.const("whole", 2, 4, dtype=torch.float64)
    found = cause(build, linear_of(build, whole, build.const("w", 3, 4, dtype=torch.float64)))
    assert isinstance(found, WrongType)
    assert found.value is whole
    build = Build()
    x = build.input("x", 2, 4)
    build.call(aten.mul_.Scalar, x, 2.0, name="write")
    found = cause(build, linear_of(build, x, build.const("w", 3, 4)))
    assert isinstance(found, WrittenTo)
    assert found.value is x
    build = Build()
    computed = build("neg", build.const("w", 3, 4))
    found = cause(build, linear_of(build, build.input("x", 2, 4), computed))
    assert isinstance(found, WrongOperand)
    assert found.found is computed


def test_only_a_type_or_a_write_keeps_a_rule_from_a_node_that_need_not_be_named() -> None:
    for static, shape, fits in ((Offer.YES, (), True), (Offer.NAMED, (), False), (Offer.YES, (2, 4), False)):
        rule = Rule("matmul", patterns.matmul, {"x": "act", "y": "act"}, static=static)
        build = Build()
        node = build("matmul", build.input("x", *shape), build.input("y", *shape[::-1]))
        taken = annotated(build.done(node), table("one", rule))
        assert only_trial(taken).fits_unnamed(node, Timing.STATIC) is fits
        assert not only_trial(taken).fits_unnamed(node, Timing.DYNAMIC)


def test_followers_are_matches_that_hand_on_what_they_read() -> None:
    build = Build()
    x = build.input("x", 2, 4)
    reshape, sigmoid = build("reshape", x, [8]), build("sigmoid", x)
    trial = only_trial(annotated(build.done(reshape, sigmoid), SMALL))
    match = trial.follower(reshape)
    assert match is not None
    assert match.rule.name == "reshape"
    assert trial.follower(sigmoid) is None
    assert trial.explain(sigmoid).matched == "sigmoid"


def test_roles_of_weights_are_those_of_the_backend() -> None:
    """A weight may lie in any operand: here the first of a matmul."""
    rule = Rule("matmul", patterns.matmul("w", "x"), {"w": "kernel", "x": "act"})
    backend = qc.Backend("first", RuleTable("first", (rule,)), {"act": UINT8, "kernel": INT8_WEIGHT})
    build = Build()
    w = build.input("w", 2, 4)
    found = cause(build, build("matmul", w, build.input("x", 4, 2)), backend)
    assert isinstance(found, WrongOperand)
    assert found.found is w
