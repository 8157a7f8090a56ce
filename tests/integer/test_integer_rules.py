"""Every rule that claims the integer form, held to the oracle bit for bit.

The rules are read from the tables: one cannot claim `integer` without passing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quantc.backends.rules import NOT_INTEGER
from quantc.integer.region_check import stray_floats
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import Offer
from quantc.testing.rule_trial import Trial
from tests.support.integer_oracle_judge import MAX_FLIPS, Judge
from tests.support.integer_oracle_models import kit_trials, varied

NAMES = ("executorch", "qnnpack", "x86")
CLAIMED = [(name, rule.name) for name in NAMES for rule in BACKENDS[name].table if "integer" in rule.supports]
REFUSED = [(name, rule.name) for name in NAMES for rule in BACKENDS[name].table if "integer" not in rule.supports]
WITHOUT_MODEL = {
    ("qnnpack", "softmax-of-float"),
    *((name, rule.name) for name in NAMES for rule in BACKENDS[name].table if rule.static is Offer.NO),
}
"""Rules that the kit makes no model for, or none with scales from calibration."""

FLOAT_TAILS: dict[tuple[str, str], str] = {
    ("linear-add", "add"): "what is added has no role in the table of x86, so it is float",
    ("linear-add", "relu"): "it follows a sum in float",
}
"""By rule and op: what may stay in float after the first op of a match, which is an integer op all the same."""

DEVIATIONS: dict[str, float] = {
    **dict.fromkeys(("softmax", "aten._safe_softmax.default"), 2.0**-20),
    **dict.fromkeys(("layer_norm", "group_norm", "instance_norm", "rms_norm"), 2.0**-20),
}
"""How much of a step the number that is rounded may be off, where the published table states a deviation: these are at
least what it states for rows as short as those here. All other ops are exact."""

PATTERNS = {rule.pattern for rule in BACKENDS["qnnpack"].table}
UNLIKE = [(name, rule) for name, rule in CLAIMED if name != "x86" or BACKENDS[name].table[rule].pattern not in PATTERNS]
"""Without the rules of x86 that take what rules of qnnpack take."""

every_rule = pytest.mark.parametrize(("backend", "rule"), CLAIMED)


def left_in_float(judge: Judge, program: Program) -> dict[str, str]:
    """The nodes of the rule that stay in float without leave."""
    found = judge.left_in_float(program)
    return {name: why for name, why in found.items() if (judge.rule, op_name(program.node(name))) not in FLOAT_TAILS}


def check(trial: Trial) -> tuple[int, int]:
    """A model through all its forms. Gives on how many elements of how many the fixed form differs."""
    judge = Judge.of(trial)
    label = trial.model.label
    assert left_in_float(judge, judge.integer) == {}, label
    assert judge.integer_nodes(), f"{label}: nothing stands for it"
    judge.integer.verify()
    assert stray_floats(judge.integer) == [], label
    assert judge.differences(DEVIATIONS) == [], label
    assert left_in_float(judge, judge.fixed) == {}, f"{label}, fixed"
    return judge.flips()


def check_all(trials: Sequence[Trial]) -> None:
    assert trials
    flips = [check(trial) for trial in trials]
    wrong, total = (sum(column) for column in zip(*flips, strict=True))
    assert wrong <= MAX_FLIPS * total


def one_for_each_op(trials: Sequence[Trial]) -> list[Trial]:
    """Of the models that differ in an option alone, the first."""
    return list({trial.model.label.partition(" (")[0]: trial for trial in reversed(trials)}.values())


def check_varied(backend: str, rule: str, examples: int) -> None:
    """Models with other shapes, settings and data. Flips of the fixed form are counted over all of them."""
    trials = kit_trials(backend, rule)
    flips: list[tuple[int, int]] = []

    @settings(
        max_examples=examples,
        phases=(Phase.explicit, Phase.generate),  # what is drawn is small; to make it smaller takes minutes
    )
    @given(data=st.data())
    def each(data: Any) -> None:
        number = data.draw(st.integers(0, len(trials) - 1))
        flips.append(check(varied(trials[number], data.draw)))

    each()
    wrong, total = (sum(column) for column in zip(*flips, strict=True))
    assert wrong <= max(1, MAX_FLIPS * total)


# -- rules that claim it -----------------------------------------------------------------------------------------


@every_rule
def test_a_model_for_each_op_is_exact(backend: str, rule: str) -> None:
    check_all(one_for_each_op(kit_trials(backend, rule)))


@pytest.mark.parametrize(("backend", "rule"), UNLIKE)
def test_other_shapes_settings_and_grids_are_exact(backend: str, rule: str) -> None:
    check_varied(backend, rule, examples=2)


@pytest.mark.slow
@every_rule
def test_all_models_of_the_kit_are_exact(backend: str, rule: str) -> None:
    check_all(kit_trials(backend, rule))


@pytest.mark.slow
@every_rule
def test_many_other_shapes_settings_and_grids_are_exact(backend: str, rule: str) -> None:
    check_varied(backend, rule, examples=12)


IN_FLOAT = [(name, rule) for name, rule in CLAIMED if BACKENDS[name].table[rule].roles.get("out", "").endswith("?")]


@pytest.mark.parametrize(("backend", "rule"), IN_FLOAT)
def test_results_in_float_are_exact(backend: str, rule: str) -> None:
    """Where nobody asks for a quantized result, integers end in the op: `f32(acc · M)`."""
    trials = one_for_each_op(kit_trials(backend, rule, in_float=True))[:3]
    assert trials
    for trial in trials:
        judge = Judge.of(trial)
        assert judge.integer_nodes(), trial.model.label
        assert judge.differences(DEVIATIONS) == [], trial.model.label


# -- rules that do not claim it ----------------------------------------------------------------------------------


def test_rules_that_are_not_integer_are_listed() -> None:
    assert {rule for _, rule in REFUSED} == set(NOT_INTEGER)
    assert all(reason for reason in NOT_INTEGER.values())


@pytest.mark.parametrize(("backend", "rule"), [pair for pair in REFUSED if pair not in WITHOUT_MODEL])
def test_rules_that_are_not_integer_say_so_rightly(backend: str, rule: str) -> None:
    """The list of exceptions may only shrink: what could claim the integer form must."""
    judges = [Judge.of(trial) for trial in kit_trials(backend, rule)]
    assert any(judge.left_in_float(judge.integer) for judge in judges)
