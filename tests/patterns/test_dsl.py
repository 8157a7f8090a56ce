"""The words of the language, and the matcher against a checker that knows nothing of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantc.errors import PatternError, UnknownNameError
from quantc.patterns import (
    Match,
    Pattern,
    Refusal,
    Rule,
    any_of,
    at_least,
    at_most,
    const,
    differs,
    equals,
    number,
    one_of,
    op,
    optional,
    out,
    result,
    shared,
    value,
)
from quantc.patterns import aten as v
from quantc.patterns.dsl import Result
from quantc.patterns.operand_patterns import LiteralValue
from tests.support.pattern_graphs import Build, attempt, found, refused

# -- values ------------------------------------------------------------------------------------------------------


def test_patterns_are_values() -> None:
    conv = op("conv2d", args="x w b?")
    again = op("conv2d", args="x w b?")
    assert conv == again
    assert hash(conv) == hash(again)
    assert conv != op("conv2d", args="x w b")
    assert len({conv >> v.relu, again >> v.relu}) == 1
    assert op("relu", where={}) == op("aten.relu.default")
    with pytest.raises(AttributeError):
        conv.name = "other"  # type: ignore[misc]


def test_true_is_not_one() -> None:
    assert op("dropout", where={"train": True}) != op("dropout", where={"train": 1})
    assert op("add")("x", True) != op("add")("x", 1)
    assert op("add")("x", 1.0) == op("add")("x", 1)


def test_patterns_print_as_they_are_written() -> None:
    pattern = v.add(op("conv1d", "conv2d", args="x w b?") >> optional(op("relu", args="_")), const("y"))
    assert str(pattern) == "add(conv1d|conv2d(x, w, b?) >> optional(relu(_)), const(y))[alpha == 1]"
    assert str(result(v.split.named("s"), 1)) == "result(s=split|split_sizes(x), 1)"
    assert repr(op("conv2d", where={"groups": one_of(1, 2)})) == "conv2d[groups in (1, 2)]"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: op("con2d"), "conv2d"),
        (op, "at least one op"),
        (lambda: op("torch.ops.load_library"), "no op"),
        (lambda: op("relu", args="x y"), "relu takes 1 arguments"),
        (lambda: op("relu", args="2x"), "cannot name an operand"),
        (lambda: op("relu", args="out"), "cannot name an operand"),
        (lambda: op("relu").named("out"), "cannot be bound"),
        (lambda: op("relu", "clamp", where={"min": 0}), "relu has no argument 'min'"),
        (lambda: op("conv2d", where={"group": 1}), "groups"),
        (lambda: op("clamp", where={"min": float("nan")}), "NaN"),
        (lambda: op("clamp", where={"min": object()}), "cannot be compared"),
        (lambda: op("clamp", where={"min": at_least("a")}), "needs a number"),  # type: ignore[arg-type]
        (lambda: op("clamp", where={"min": one_of()}), "at least one value"),
        (lambda: out("relu", 0), "single tensor"),
        (lambda: v.relu >> v.add(v.relu, "y"), "already relu"),
        (lambda: v.relu >> v.mul(const("c"), "y"), "already const(c)"),
        (lambda: v.relu >> "x", "cannot follow"),
        (lambda: v.relu >> any_of("x", v.relu), "is a value"),
        (lambda: optional("x"), "takes a pattern"),  # type: ignore[arg-type]
        (any_of, "at least one pattern"),
        (lambda: value("x", dtype="float32"), "f32"),
        (lambda: const("xs*"), "both a list and a const"),
        (lambda: Rule("r", optional(v.relu)), "without any node"),
        (lambda: Rule("r", any_of("x", v.relu)), "without any node"),
        (lambda: Rule("r", shared(v.relu)), "claim nothing"),
        (lambda: Rule("r", "relu"), "not a pattern"),  # type: ignore[arg-type]
    ],
)
def test_malformed_patterns_say_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        make()
    assert message in str(caught.value)


def test_huge_patterns_are_refused_not_crashed_on() -> None:
    def deeper(pattern: Pattern) -> Pattern:
        return pattern >> v.relu

    def wider(pattern: Pattern) -> Pattern:
        return v.add(pattern, pattern)

    def nested(pattern: Pattern) -> Pattern:
        return v.relu(pattern)

    def grown(grow: Callable[[Pattern], Pattern]) -> Pattern:
        pattern: Pattern = v.relu
        for _ in range(10_000):
            pattern = grow(pattern)
        return pattern

    for grow in (deeper, wider, nested):
        with pytest.raises(PatternError, match="too large"):
            grown(grow)


def test_many_optional_steps_compile_in_linear_time() -> None:
    pattern: Pattern = v.conv
    for _ in range(15):
        pattern = pattern >> optional(shared(v.relu) >> v.sigmoid)
    assert Rule("rule", pattern).compiled.required == 1


# -- operands ----------------------------------------------------------------------------------------------------


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


def test_a_size_is_not_a_tensor() -> None:
    b = Build()
    x = b.input("x")
    size = b("sym_size", x, 0)
    doubled = b.call(operator.mul, size, 2)
    scaled = b("mul", x, doubled)
    program = b.done(scaled)
    assert "expected a tensor for y, found mul" in refused(v.mul("x", "y"), program, scaled)


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


# -- attributes --------------------------------------------------------------------------------------------------


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


def test_result_patterns_name_their_node() -> None:
    named = result(v.split, 0).named("half")
    assert isinstance(named, Result)
    assert named.name == "half"
    assert LiteralValue([1, 2]) == LiteralValue((1, 2))
