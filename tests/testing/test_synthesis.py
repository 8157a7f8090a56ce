"""Models made of patterns: each holds the pattern, and together they show all of its options."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from quantc.patterns import aten
from quantc.patterns.checks import at_least, differs, one_of
from quantc.patterns.dsl import any_of, op, optional, out, result, shared
from quantc.patterns.operand_patterns import const, number, value
from quantc.patterns.table import Rule, RuleTable
from quantc.testing.synthesis import models_of
from tests.support.faulty_backends import GOOD


def _labels(rule: Rule) -> list[str]:
    return [model.label for _, model in models_of(rule).made]


def test_models_are_sound_and_hold_the_pattern() -> None:
    for rule in GOOD.table:
        bare = RuleTable("bare", (replace(rule, roles={}),))
        for _, model in models_of(rule).made:
            model.program.verify()
            assert len(bare.match(model.program)) == 1, model.label


def test_models_show_every_op_every_optional_part_and_lists_of_two_and_three() -> None:
    conv = _labels(Rule("conv", aten.conv("x", const("w"), const("b?")) >> optional(aten.clamp)))
    for shown in ("conv1d", "conv2d", "conv3d", "clamp", "relu", "without b", "groups=8", "without relu|clamp"):
        assert any(shown in label for label in conv), shown
    cats = [model.program for _, model in models_of(Rule("cat", aten.cat)).made]
    assert {len(program.signature.inputs) for program in cats} == {2, 3}


def test_the_number_of_models_grows_with_the_sum_of_the_options() -> None:
    rule = Rule("conv", aten.conv("x", const("w"), const("b?")) >> optional(aten.activation))
    assert len(_labels(rule)) <= 3 + len(aten.activation.ops) + 6


def test_options_that_do_not_go_together_are_matched_up() -> None:
    explored = models_of(Rule("conv-pool", aten.conv >> op("max_pool2d", "max_pool1d", "max_pool3d", args="_")))
    assert explored.unshown == []
    pairs = {tuple(re.findall(r"[123]d", model.label.partition(" (")[0])) for _, model in explored.made}
    assert pairs == {("1d", "1d"), ("2d", "2d"), ("3d", "3d")}


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(op("mul")("x", op("sigmoid")("x")), id="one-value-twice"),
        pytest.param(op("div")(op("mul")("x", op("clamp")(aten.add("x", 3), 0, 6)), 6), id="hardswish"),
        pytest.param(aten.add(aten.conv.named("left"), aten.conv.named("right")), id="two-of-a-kind"),
        pytest.param(aten.mul("x", any_of(const("c"), number("c"))), id="constant-or-number"),
        pytest.param(op("conv2d", args="x w", where={"stride": 2, "groups": one_of(1, 2)}), id="attributes"),
        pytest.param(op("conv2d", args="x w", where={"padding": at_least(1), "dilation": differs(1)}), id="bounds"),
        pytest.param(out("max", 0, args="x"), id="one-of-two-results"),
        pytest.param(result(shared(op("split", args="x")), 0) >> aten.clamp, id="shared"),
        pytest.param(aten.cat([aten.conv, "y"]) >> optional(aten.relu), id="list-of-operands"),
        pytest.param(optional(aten.relu) >> aten.conv, id="optional-first"),
        pytest.param(op("linear")(value("x", rank=4), const("w")), id="rank"),
        pytest.param(op("relu", args="x") >> op("conv1d", args="_ w"), id="rank-asked-for-below"),
        pytest.param(op("flatten", args="x") >> aten.linear("_", const("w")), id="rank-changes"),
    ],
)
def test_the_model_of_a_pattern_matches_it(pattern: Any) -> None:
    rule = Rule("one", pattern)
    explored = models_of(rule)
    assert explored.made
    assert explored.unshown == []
    for _, model in explored.made:
        matches = RuleTable("one", (rule,)).match(model.program)
        assert [node.name for match in matches for node in match.nodes], model.label
