"""The words of the language, and the matcher against a checker that knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quantc.errors import PatternError
from quantc.patterns import (
    Pattern,
    Rule,
    any_of,
    at_least,
    const,
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
        (lambda: op("torch.ops.load_library"), "unknown op"),
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


def test_result_patterns_name_their_node() -> None:
    named = result(v.split, 0).named("half")
    assert isinstance(named, Result)
    assert named.name == "half"
    assert LiteralValue([1, 2]) == LiteralValue((1, 2))
