"""The parts of a compiled pattern: how ops, lists, literals and leaves fit the values of a graph."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import PatternError, UnknownNameError
from quantc.patterns import (
    Match,
    Refusal,
    any_of,
    at_least,
    at_most,
    const,
    differs,
    equals,
    number,
    one_of,
    op,
    value,
)
from quantc.patterns import aten as v
from quantc.patterns.refusals import WrongArguments, WrongOp, WrongOperand
from tests.support.pattern_graphs import Build, attempt, found, refused


def test_operands_bind_by_position_or_keyword_and_may_be_absent() -> None:
    b = Build()
    x, w, bias = b.input("x", 1, 4, 8, 8), b.const("w", 4, 4, 1, 1), b.const("bias", 4)
    plain = b("conv2d", x, w)
    full = b("conv2d", plain, w, bias)
    keyword = b("conv2d", full, w, bias=bias)
    program = b.done(keyword)
    assert found(v.conv, program, plain).bindings == {"x": x, "w": w, "b": None}
    assert found(v.conv, program, full)["b"] is bias
    assert found(v.conv, program, keyword)["b"] is bias
    assert found(v.conv("x", "w", None), program, plain)["out"] is plain
    assert "found bias" in refused(v.conv("x", "w", None), program, full)
    assert refused(v.conv("x", "w", "b"), program, plain) == "expected a tensor for b, found nothing"
    with pytest.raises(UnknownNameError, match="binds no 'weight'"):
        found(v.conv, program, plain)["weight"]
    with pytest.raises(PatternError, match="not a node"):
        found(v.conv, program, plain).node("b")


def test_constants_numbers_and_literals() -> None:
    b = Build()
    x, c = b.input("x", 4), b.const("c", 4)
    product = b("mul", x, c)
    shift = b("add", product, 3)
    program = b.done(shift)
    assert found(v.mul("y", const("k")), program, product).bindings == {"y": x, "k": c}
    assert found(v.mul(const("k"), "y"), program, product).bindings == {"k": c, "y": x}
    assert refused(v.mul(const("k"), const("l")), program, product).startswith("expected a constant tensor for k")
    assert found(v.add("y", number("n")), program, shift)["n"] == 3
    assert found(v.add("y", 3.0), program, shift)["y"] is product
    assert "expected 4" in refused(v.add("y", 4), program, shift)
    assert "expected True" in refused(v.add("y", True), program, shift)
    assert found(v.add("y", any_of(const("n"), number("n"))), program, shift)["n"] == 3


def test_dtype_and_rank_of_operands() -> None:
    b = Build()
    x = b.input("x", 2, 3)
    untyped = b.input("untyped")
    relu, other = b("relu", x), b("relu", untyped)
    program = b.done(relu, other)
    assert found(v.relu(value("x", dtype="f32", rank=2)), program, relu)["x"] is x
    assert found(v.relu(value("x", dtype=(torch.float16, torch.float32))), program, relu)["x"] is x
    assert "x (placeholder) is f32[2,3], wanted rank 4" in refused(v.relu(value("x", rank=4)), program, relu)
    assert "wanted i8" in refused(v.relu(value("x", dtype="i8")), program, relu)
    assert "is unknown" in refused(v.relu(value("x", rank=4)), program, other)


def test_list_operands() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    relu = b("relu", x)
    joined = b("cat", [relu, y], 1)
    program = b.done(joined)
    assert found(v.cat, program, joined)["xs"] == (relu, y)
    match = found(op("cat")([v.relu("x"), "y"]), program, joined)
    assert match.bindings == {"x": x, "y": y}
    assert match.nodes == (relu, joined)
    assert "a list of 3" in refused(op("cat")(["x", "y", "z"]), program, joined)
    assert refused(op("cat")([v.sigmoid, "y"]), program, joined) == "expected sigmoid, found relu"


@pytest.mark.parametrize(
    ("check", "fits"),
    [
        ({"groups": 2}, True),
        ({"groups": equals(1)}, False),
        ({"groups": differs(1)}, True),
        ({"groups": one_of(1, 2)}, True),
        ({"groups": at_least(2), "stride": 1}, True),
        ({"groups": at_most(1)}, False),
        ({"padding": 1}, True),
        ({"padding": (1, 1)}, True),
        ({"padding": (1, 2)}, False),
        ({"padding": at_least(1)}, True),
        ({"padding": at_least(2)}, False),
        ({"dilation": None}, False),
    ],
)
def test_attribute_checks_see_defaults_and_lists(check: dict[str, object], fits: bool) -> None:
    b = Build()
    x, w = b.input("x", 1, 4, 8, 8), b.const("w", 4, 2, 3, 3)
    conv = b("conv2d", x, w, None, padding=[1, 1], groups=2)
    outcome = attempt(op("conv2d", where=check), b.done(conv), conv)
    assert isinstance(outcome, Match) is fits
    if isinstance(outcome, Refusal):
        assert outcome.reason.startswith("conv2d has ")


def test_computed_attributes_are_refused_by_every_check() -> None:
    b = Build()
    x = b.input("x")
    clamp = b("clamp", x, b("sym_size", x, 0))
    program = b.done(clamp)
    assert "computed" in refused(op("clamp", where={"min": differs(0)}), program, clamp)


def test_dropout_mode() -> None:
    b = Build()
    off = b("dropout", b.input("x"), 0.5, False)
    on = b("dropout", off, 0.5, True)
    program = b.done(on)
    pattern = op("dropout", where={"train": False})
    assert found(pattern, program, off).root is off
    assert refused(pattern, program, on) == "dropout_1 has train = True, wanted train == False"


def test_every_argument_that_does_not_fit_is_reported_at_once() -> None:
    b = Build()
    conv = b("conv2d", b.input("x"), b.const("w", 4, 2, 3, 3), None, padding=[1, 1], groups=2)
    wanted = op("conv2d", where={"groups": 1, "padding": at_most(0), "stride": 1})
    outcome = attempt(wanted, b.done(conv), conv)
    assert isinstance(outcome, Refusal)
    assert isinstance(outcome.cause, WrongArguments)
    assert [(fault.argument, fault.found) for fault in outcome.cause.faults] == [("groups", 2), ("padding", [1, 1])]


def test_a_refusal_tells_the_ops_and_the_kind_of_operand_that_were_wanted() -> None:
    b = Build()
    x = b.input("x")
    relu = b("relu", x)
    product = b("mul", relu, x)
    program = b.done(product)
    outcome = attempt(any_of(v.softmax, v.elu), program, relu)
    assert isinstance(outcome, Refusal)
    assert isinstance(outcome.cause, WrongOp)
    assert outcome.cause.ops == ("softmax", "log_softmax")
    outcome = attempt(v.mul(v.relu, number("n")), program, product)
    assert isinstance(outcome, Refusal)
    assert isinstance(outcome.cause, WrongOperand)
    assert (outcome.cause.name, outcome.cause.wanted.value, outcome.cause.found) == ("n", "number", x)
    assert outcome.progress == 2


def test_a_number_is_no_bool_and_no_computed_number() -> None:
    b = Build()
    x = b.input("x")
    flagged, scaled = b("mul", x, True), b("mul", x, b("sym_size", x, 0))
    program = b.done(flagged, scaled)
    assert refused(v.mul("x", number("n")), program, flagged) == "expected a number for n, found True"
    assert refused(v.mul("x", number("n")), program, scaled) == "expected a number for n, found sym_size"


def test_a_lone_operand_of_a_commuting_op_may_stand_on_either_side() -> None:
    b = Build()
    x, c = b.input("x"), b.const("c", 2)
    left, right, minus = b("add", c, x), b("add", x, c), b("sub", x, c)
    program = b.done(left, right, minus)
    for node in (left, right):
        assert found(op("add")(const("k")), program, node)["k"] is c
    assert "expected a constant tensor for k" in refused(op("sub")(const("k")), program, minus)
