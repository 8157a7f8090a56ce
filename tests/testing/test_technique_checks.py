"""Techniques of a rule, asked for by a config: dynamic, weight-only, and rules that a config has to name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quantc.ir.plan import Source
from quantc.spec.formats import DType, Offer, PerGroup, PerToken, Role, Timing
from quantc.spec.spec import INT8_WEIGHT_ONLY, UINT8_TOKEN
from quantc.testing.technique_checks import GROUP, asked_for, dynamic, named, specs_of, weight_only
from tests.support.faulty_backends import GOOD
from tests.support.trials import BY_NAME, faulty_trial, good_trial, trials


def test_specs_are_one_of_each_dtype_and_of_each_granularity() -> None:
    weights = specs_of(GOOD, Role.WEIGHT, Timing.WEIGHT_ONLY)
    assert [(spec.dtype, type(spec.granularity).__name__) for spec in weights] == [
        (DType.INT8, "PerChannel"),
        (DType.INT4, "PerChannel"),
        (DType.INT8, "PerGroup"),
    ]
    assert weights[2].granularity == PerGroup(size=GROUP)
    activations = specs_of(GOOD, Role.ACT, Timing.DYNAMIC)
    assert [isinstance(spec.granularity, PerToken) for spec in activations] == [False, True]
    assert all(spec.timing is Timing.DYNAMIC for spec in activations)
    assert specs_of(GOOD, Role.BIAS, Timing.DYNAMIC) == []


@pytest.mark.parametrize("rule", ["linear", "matmul"])
def test_nothing_is_said_against_good_rules(rule: str) -> None:
    trial = good_trial(rule)
    assert dynamic(trial) == []
    assert weight_only(trial) == ([] if rule == "linear" else None), "a product of activations has no weight"


def test_rules_that_do_not_offer_it_are_not_asked() -> None:
    assert dynamic(good_trial("add")) is None
    assert named(good_trial("linear")) is None


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (dynamic, "dynamic-without-specs"),
        (dynamic, "dynamic-lookup"),
        (dynamic, "dynamic-join"),
        (dynamic, "dynamic-in-name"),
        (named, "named-follower"),
        (weight_only, "weights-too-large"),
    ],
)
def test_a_fault_is_found_by_the_check_it_is_for(check: Any, name: str) -> None:
    faults = check(faulty_trial(name))
    assert faults
    assert BY_NAME[name].says in faults[0].what
    assert faults[0].advice


def test_a_rule_that_a_config_has_to_name_takes_what_is_named() -> None:
    add = replace(GOOD.table["add"], static=Offer.NAMED)
    backend = replace(GOOD, table=replace(GOOD.table, rules=(add,)))
    assert named(trials(backend, "add")[0]) == []


def test_a_program_is_prepared_as_it_was_asked_for() -> None:
    trial = good_trial("linear")
    at_run_time, stored = asked_for(trial, UINT8_TOKEN), asked_for(trial, INT8_WEIGHT_ONLY)
    for prepared, timing in ((at_run_time, Timing.DYNAMIC), (stored, Timing.WEIGHT_ONLY)):
        assert prepared is not None
        assert timing in {claim.timing for claim in prepared.plan.claims.rows.values()}
    assert stored is not None
    assert not any(group.source is Source.DATA for group in stored.plan.groups), "weights alone wait for no data"
    assert asked_for(good_trial("sigmoid"), INT8_WEIGHT_ONLY) is None, "it has no weight"


def test_groups_that_do_not_divide_a_weight_are_not_asked_for() -> None:
    trial = good_trial("linear")
    weight = trial.prepared.tensor(trial.slots[1].value)
    assert weight is not None
    assert all(size % GROUP == 0 for size in weight.shape)
    assert asked_for(trial, specs_of(GOOD, Role.WEIGHT, Timing.WEIGHT_ONLY)[2]) is not None
