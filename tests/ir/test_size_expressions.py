"""Size expressions: arithmetic read from text, of which nothing is executed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantc.ir.size_expressions import evaluate, least

EXPRESSIONS = st.recursive(
    st.sampled_from(["s0", "s1", "0", "1", "7"]),
    lambda inner: st.one_of(
        st.builds(lambda a, op, b: f"({a} {op} {b})", inner, st.sampled_from(["+", "*"]), inner),
        st.builds(lambda a, op, n: f"({a} {op} {n})", inner, st.sampled_from(["-", "//"]), st.integers(1, 5)),
        st.builds(lambda f, a, b: f"{f}({a}, {b})", st.sampled_from(["max", "min"]), inner, inner),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("s0", 5),
        ("2*s0 + 1", 11),
        ("s0 - s1", 3),
        ("-s0", -5),
        ("s0 // 2", 2),
        ("-s0 // 2", -3),
        ("s0 % 3", 2),
        ("FloorDiv(s0 + 1, s1)", 3),
        ("Max(1, s0, s1)", 5),
        ("Min(s0, s1)", 2),
    ],
)
def test_arithmetic_on_bound_symbols(text: str, value: int) -> None:
    assert evaluate(text, {"s0": 5, "s1": 2}) == value


@pytest.mark.parametrize(
    "text",
    ["s2", "s0 +", "s0 / 2", "s0 // 0", "s0 % 0", "1.5", "__import__('os')", "s0.real", "Max()", "abs(s0)", "(" * 5000],
)
def test_anything_else_has_no_value_and_no_bound(text: str) -> None:
    assert evaluate(text, {"s0": 5}) is None
    assert least(text, {"s0": (1, 5)}) is None


@given(EXPRESSIONS, st.integers(0, 6), st.integers(0, 6), st.integers(0, 4), st.integers(0, 4))
def test_no_value_is_below_the_bound(text: str, low0: int, low1: int, more0: int, more1: int) -> None:
    bound = least(text, {"s0": (low0, None), "s1": (low1, low1 + 4)})
    value = evaluate(text, {"s0": low0 + more0, "s1": low1 + more1})
    assert value is not None
    assert bound is None or bound <= value


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("s0", 2),
        ("3*s0 + s1", 7),
        ("s0 - 1", 1),
        ("s0 // 2 + 1", 2),
        ("FloorDiv(s1, 3)", 0),
        ("Max(s0, 9)", 9),
        ("Min(s0, s1)", 1),
        ("4 - s0", None),
        ("s0 * (s1 - 5)", None),
        ("s0 + s9", None),
    ],
)
def test_bounds_are_those_at_the_lower_ends_where_growth_is_certain(text: str, bound: int | None) -> None:
    assert least(text, {"s0": (2, 8), "s1": (1, None)}) == bound
