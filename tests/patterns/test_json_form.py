"""Rule tables as JSON: what is written reads back, and what is malformed is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.errors import PatternError
from quantc.patterns import (
    Match,
    Pattern,
    Rule,
    RuleTable,
    any_of,
    at_least,
    const,
    differs,
    equals,
    number,
    one_of,
    op,
    optional,
    out,
    predicate,
    result,
    shared,
    value,
)
from quantc.patterns import aten as v
from quantc.patterns.dsl import MAX_DEPTH, OpPattern
from quantc.patterns.operand_patterns import LiteralValue


@predicate("json-is-odd")
def why_not_odd(match: Match) -> str | None:
    return None if len(match.root.users) % 2 else "even"


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.just(torch.float16)
)
PLAIN = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
CHECKS = st.one_of(
    PLAIN.map(equals),
    PLAIN.map(differs),
    st.lists(PLAIN, min_size=1, max_size=3).map(lambda values: one_of(*values)),
    st.floats(allow_nan=False).map(at_least),
)
NAMES = st.sampled_from(["x", "y", "w", "naïve"])
TOKENS = st.one_of(NAMES, NAMES.map("{}?".format), NAMES.map("{}*".format), st.sampled_from(["_", "_?", "_*", "xs*?"]))
OPERANDS = st.one_of(
    TOKENS,
    NAMES.map(const),
    NAMES.map("{}?".format).map(number),
    st.builds(value, NAMES, dtype=st.sampled_from(["f32", ("f32", "i8")]), rank=st.sampled_from([(), 4, (2, 3)])),
    PLAIN.map(LiteralValue),
)


def _call(pattern: OpPattern, operands: list[Any], where: Any, name: str | None) -> OpPattern:
    checked = pattern.having(training=where) if where is not None else pattern
    return replace(checked(*operands), name=name)


def _grow(child: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Any]:
    operands = st.lists(st.one_of(OPERANDS, child, st.lists(st.one_of(OPERANDS, child), max_size=2)), max_size=3)
    calls = st.builds(
        _call,
        st.just(op("batch_norm")),
        operands,
        st.one_of(st.none(), CHECKS),
        st.sampled_from([None, "n"]),
    )
    return st.one_of(
        calls,
        st.builds(any_of, child, st.one_of(child, OPERANDS)),
        child.map(shared),
        st.builds(lambda part: part >> optional(v.relu >> v.tanh), child),
        st.builds(lambda part: part >> result(v.split, 1).named("half"), child),
    )


JSON_PATTERNS = st.recursive(st.sampled_from([v.relu, v.conv, out("max")]), _grow, max_leaves=5)


def _as_rule(pattern: Pattern) -> Rule | None:
    try:
        return Rule("rule", pattern, roles={"out": "act"}, when="json-is-odd", supports=frozenset({"qdq"}))
    except PatternError:
        return None


@settings(max_examples=300)
@given(st.lists(JSON_PATTERNS.map(_as_rule).filter(lambda rule: rule is not None), max_size=3))
def test_json_round_trip_law(rules: list[Rule]) -> None:
    table = RuleTable("tåble", tuple(replace(rule, name=f"r{index}") for index, rule in enumerate(rules)))
    text = table.to_json()
    again = RuleTable.from_json(text)
    assert again == table
    assert hash(again) == hash(table)
    assert again.to_json() == text


def test_unregistered_conditions_cannot_be_written() -> None:
    table = RuleTable("table", (Rule("r", v.relu, when=lambda match: None),))
    with pytest.raises(PatternError, match="register it: @predicate"):
        table.to_json()


def document(**rule: Any) -> str:
    base = {"name": "r", "pattern": {"op": ["relu"]}}
    return json.dumps({"format": "quantc-rules", "version": 1, "name": "t", "rules": [{**base, **rule}]})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ("not JSON",)),
        ("[]", ("an object", "table")),
        (b"\xff\xfe\xff", ("not JSON",)),
        ('{"a": 1, "a": 2}', ("given twice",)),
        ('{"format": NaN}', ("NaN",)),
        ('{"format": "quantc-rules"}', ("'version' is missing",)),
        ('{"format": "quantc-rules", "version": 2, "name": "t", "rules": []}', ("version 2",)),
        ('{"format": "quantc-rules", "version": true, "name": "t", "rules": []}', ("version True",)),
        ('{"format": "quantc-rules", "version": 1, "name": "t", "rules": {}}', ("a list", "rules")),
        ('{"format": "quantc-rules", "version": 1, "name": 1, "rules": []}', ("a string", "name")),
        (document(name=3), ("a string", "rules[0].name")),
        (document(name="A b"), ("not a name", "rules[0]")),
        (document(color="red"), ("unknown field 'color'", "rules[0].color")),
        (document(pattern="x"), ("an operand", "rules[0].pattern")),
        (document(pattern=3), ("an object", "rules[0].pattern")),
        (document(pattern={}), ("no kind of pattern", "rules[0].pattern")),
        (document(pattern={"op": "relu"}), ("a list", "rules[0].pattern.op")),
        (document(pattern={"op": ["rely"]}), ("did you mean relu", "rules[0].pattern")),
        (document(pattern={"op": ["relu"], "arg": []}), ("did you mean args", "rules[0].pattern.arg")),
        (document(pattern={"op": ["relu"], "args": ["2x"]}), ("'2x'", "rules[0].pattern.args[0]")),
        (document(pattern={"op": ["relu"], "args": [{"const": 1}]}), ("a string", "rules[0].pattern.args[0].const")),
        (document(pattern={"op": ["relu"], "args": [{"number": "n", "rank": [1]}]}), ("rank", "pattern.args[0]")),
        (document(pattern={"op": ["relu"], "where": {"y": {"equals": 1}}}), ("no argument 'y'", "rules[0].pattern")),
        (document(pattern={"op": ["clamp"], "where": {"min": {"equal": 1}}}), ("did you mean equals", "where.min")),
        (document(pattern={"op": ["clamp"], "where": {"min": {}}}), ("exactly one", "where.min")),
        (document(pattern={"op": ["clamp"], "where": {"min": {"equals": {"dtype": "x"}}}}), ("not a value", "equals")),
        (document(pattern={"op": ["relu"], "name": "out"}), ("cannot be bound", "rules[0].pattern")),
        (document(pattern={"chain": [{"op": ["relu"]}]}), ("two steps", "rules[0].pattern")),
        (document(pattern={"chain": [{"op": ["relu"]}, "x"]}), ("is a value", "rules[0].pattern.chain")),
        (document(pattern={"result": {"op": ["relu"]}, "index": 0}), ("single tensor", "rules[0].pattern")),
        (document(pattern={"result": {"op": ["max"]}, "index": "0"}), ("whole number", "rules[0].pattern.index")),
        (document(pattern={"optional": {"op": ["relu"]}}), ("without any node", "rules[0]")),
        (document(roles={"y": "act"}), ("binds no such name", "rules[0]")),
        (document(roles={"out": 3}), ("a string", "rules[0].roles.out")),
        (document(when=["json-is-od"]), ("did you mean json-is-odd", "rules[0]")),
        (document(supports=["qd"]), ("did you mean qdq", "rules[0]")),
        ('{"a":' * 100_000, ("nested too deeply",)),
    ],
)
def test_malformed_json_names_the_field(text: str | bytes, parts: tuple[str, ...]) -> None:
    with pytest.raises(PatternError) as caught:
        RuleTable.from_json(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 250, 100_000])
def test_deep_json_is_an_error_not_a_crash(depth: int) -> None:
    head, tail = document(pattern="HERE").split('"HERE"')
    nested = '{"shared":' * depth + '{"op":["relu"]}' + "}" * depth
    with pytest.raises(PatternError, match=r"too deeply|too large"):
        RuleTable.from_json(head + nested + tail)
