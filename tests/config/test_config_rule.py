"""One rule of a config: what may be asked for, for which roles, and how it is written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from quantc.config.config_rule import ConfigRule
from quantc.config.selectors import ByAll, ByOp
from quantc.errors import ConfigError, QuantcError
from quantc.ir.decisions import FLOAT, Fixed, Float, Quantize, SameAs
from quantc.ir.sites import Site
from quantc.spec.formats import Role, Timing
from quantc.spec.spec import INT4_GROUP, INT8, INT8_DYNAMIC, INT8_WEIGHT, UINT8, QuantSpec
from tests.support.specs import specs


def rule(use: Any, role: str | None = None) -> ConfigRule:
    return ConfigRule.model_validate({"select": {"by": "all"}, "use": use, "role": role})


@pytest.mark.parametrize(
    ("given_as", "use"),
    [
        (INT8, Quantize(INT8)),
        ("INT8", Quantize(INT8)),
        ("uint8", Quantize(UINT8)),
        ("FLOAT", FLOAT),
        ({"kind": "float", "reason": "a mask"}, Float("a mask")),
        (Fixed(0.5, 0, UINT8), Fixed(0.5, 0, UINT8)),
    ],
    ids=str,
)
def test_a_use_is_a_spec_its_text_its_name_or_a_decision(given_as: Any, use: Any) -> None:
    assert rule(given_as).use == use


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("INT9", "INT9"),
        ("int9", "int9"),
        ("int8{qmin=3}", "must contain 0"),
        ({"kind": "same"}, "same"),
        (3, "use"),
        (SameAs(Site("", "add", out=0)), "use"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(use: Any, told: str) -> None:
    with pytest.raises(QuantcError, match=told):
        rule(use)


@given(specs())
def test_rules_round_trip_as_data(spec: QuantSpec) -> None:
    made = rule(spec)
    assert ConfigRule.model_validate_json(made.model_dump_json()) == made


def test_named_settings_are_written_by_name() -> None:
    assert [rule(use).model_dump()["use"] for use in (INT8_WEIGHT, FLOAT, UINT8)] == ["INT8_WEIGHT", "FLOAT", "UINT8"]
    assert rule(Fixed(0.5, 3, UINT8)).model_dump()["use"]["zero_point"] == 3


def test_a_spec_is_for_its_own_role_alone() -> None:
    assert rule(INT8).settings == {Role.ACT: Quantize(INT8)}
    assert rule(INT8_WEIGHT, "weight").settings == {Role.WEIGHT: Quantize(INT8_WEIGHT)}
    with pytest.raises(ConfigError, match="INT8 is meant for act, not for weight"):
        rule(INT8, "weight")


def test_float_is_for_all_roles_or_for_the_one_named() -> None:
    assert rule(FLOAT).settings == dict.fromkeys(Role, FLOAT)
    assert rule(FLOAT, "weight").settings == {Role.WEIGHT: FLOAT}


def test_weight_only_leaves_the_other_roles_float() -> None:
    made = rule(INT4_GROUP)
    assert made.is_weight_only
    assert made.settings[Role.WEIGHT] == Quantize(INT4_GROUP)
    assert {type(made.settings[role]) for role in (Role.ACT, Role.BIAS)} == {Float}


def test_the_technique_is_that_of_the_spec() -> None:
    assert [rule(use).timing for use in (INT8, INT8_DYNAMIC, INT4_GROUP, FLOAT)] == [
        Timing.STATIC,
        Timing.DYNAMIC,
        Timing.WEIGHT_ONLY,
        Timing.STATIC,
    ]


def test_rules_print_what_they_select_and_say() -> None:
    assert str(ConfigRule(select=ByOp(op="add"), use=Quantize(UINT8))) == "op add: quantize as UINT8"
    assert str(ConfigRule(select=ByAll(), use=FLOAT, role=Role.BIAS)) == "everything (bias only): float: asked for"


def test_a_misspelled_float_is_refused_with_the_word_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="FLOT") as caught:
        rule("FLOT")
    assert caught.value.advice is not None
    assert "FLOAT" in caught.value.advice
