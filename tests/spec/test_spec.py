"""Specs and outcomes: values that re-validate, compare, hash, and round-trip as text and as JSON."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from pydantic import ValidationError

from quantc.errors import ParseError, SpecError
from quantc.spec.formats import DType, PerChannel, PerGroup, Scheme, Timing
from quantc.spec.spec import (
    FLOAT32_EPS,
    INT4_GROUP,
    INT8,
    INT8_DYNAMIC,
    INT8_NARROW_WEIGHT,
    INT8_WEIGHT,
    NAMED,
    UINT8,
    Observe,
    QuantSpec,
    name_of,
)
from tests.support.specs import specs


@given(specs())
def test_specs_round_trip_as_json_and_as_text(spec: QuantSpec) -> None:
    assert QuantSpec.model_validate_json(spec.model_dump_json()) == spec
    again = QuantSpec.parse(str(spec))
    assert again == spec
    assert hash(again) == hash(spec)


@given(specs())
def test_changing_nothing_changes_nothing(spec: QuantSpec) -> None:
    assert spec.but() == spec
    for field in QuantSpec.model_fields:
        assert spec.but(**{field: getattr(spec, field)}) == spec


@given(specs(), specs())
def test_a_changed_field_has_the_value_asked_for(spec: QuantSpec, other: QuantSpec) -> None:
    changed = spec.but(observe=other.observe, eps=other.eps)
    assert (changed.observe, changed.eps) == (other.observe, other.eps)
    assert changed.but(observe=spec.observe, eps=spec.eps) == spec


def test_equal_specs_are_one_key() -> None:
    assert len({INT8, QuantSpec(dtype=DType.INT8), QuantSpec.parse("int8"), INT8.but(qmin=-128)}) == 1
    assert INT8.but(qmin=-128).but(dtype="uint8") == UINT8


@pytest.mark.parametrize(("name", "spec"), NAMED.items())
def test_named_specs_read_back_by_name_and_by_text(name: str, spec: QuantSpec) -> None:
    assert QuantSpec.parse(name) == QuantSpec.parse(str(spec)) == spec
    assert name_of(spec) == name


def test_the_names_mean_what_they_say() -> None:
    assert (INT8_WEIGHT.scheme, INT8_WEIGHT.granularity) == (Scheme.SYMMETRIC, PerChannel(axis=0))
    assert (INT8_NARROW_WEIGHT.qmin, INT8_NARROW_WEIGHT.qmax) == (-127, 127)
    assert INT8_DYNAMIC.timing is Timing.DYNAMIC
    assert (INT4_GROUP.qmin, INT4_GROUP.qmax, INT4_GROUP.granularity) == (-8, 7, PerGroup(axis=1, size=32))
    assert str(INT8_WEIGHT) == "int8{role=weight granularity=per-channel scheme=symmetric}"


def test_zero_is_a_value_like_any_other() -> None:
    assert UINT8.but(qmin=0, qmax=127).qmin == 0
    assert INT8.but(qmin=0).qmin == 0
    assert INT8.but(qmin=-5, qmax=0).qmax == 0
    assert INT8_WEIGHT.but(granularity=PerChannel(axis=1)).but(granularity=PerChannel(axis=0)) == INT8_WEIGHT


def test_defaults_follow_dtype_and_role_and_what_was_given_stays() -> None:
    assert INT8.eps == 2**-12
    assert INT8_WEIGHT.eps == FLOAT32_EPS == torch.finfo(torch.float32).eps
    assert INT8.but(role="weight").eps == FLOAT32_EPS
    assert INT8.but(eps=1e-3).but(role="weight").eps == 1e-3
    assert INT8.but(dtype="uint8") == UINT8
    assert UINT8.but(qmax=127).but(dtype="int8").qmax == 127
    assert INT8.but(qmax=100).but(qmax=None) == INT8


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"dtype": "int9"}, "dtype: Input should be 'int2', 'int3'"),
        ({"dtype": "int8", "qmin": -129}, "qmin and qmax must lie in -128..127, the range of int8"),
        ({"dtype": "int8", "qmin": 5}, "must contain 0"),
        ({"dtype": "int8", "qmin": 0, "qmax": 0}, "with qmin below qmax"),
        ({"dtype": "int8", "qmin": True}, "qmin: Input should be a valid integer"),
        ({"dtype": "int8", "scheme": "symmetric", "qmin": -100}, "must be balanced"),
        ({"dtype": "int8", "eps": 0}, "eps: it must be a positive finite number"),
        ({"dtype": "int8", "eps": float("nan")}, "eps: it must be a positive finite number"),
        ({"dtype": "fp8_e4m3", "scheme": "affine"}, "scheme: fp8_e4m3 has no zero point"),
        ({"dtype": "fp16", "scheme": "symmetric", "granularity": "per-channel"}, "granularity: fp16 has no scale"),
        ({"dtype": "int8", "granularity": "per-row"}, "granularity: Input tag 'per-row'"),
        ({"dtype": "int8", "granularity": {"kind": "per-group", "size": 1}}, "size: Input should be greater than 1"),
        ({"dtype": "int8", "timing": "dynamic", "role": "weight"}, "timing: only activations can be dynamic"),
        ({"dtype": "int8", "timing": "weight-only"}, "timing: weight-only is for weights"),
        ({"dtype": "int8", "granularity": "per-token", "role": "weight"}, "granularity: per-token is for activations"),
        ({"dtype": "int8", "observe": "mmse"}, "unknown observation 'mmse'; did you mean mse"),
        ({"dtype": "int8", "observe": "percentile{percentile=10}"}, "percentile: Input should be greater than 50"),
        ({"dtype": "int8", "observe": "minmax{rate=1}"}, "the observation minmax has no option 'rate'"),
        ({"dtype": "int8", "bits": 8}, "bits: Extra inputs are not permitted"),
        ({}, "dtype: Field required"),
    ],
)
def test_a_faulty_field_is_named_with_what_is_allowed(fields: dict[str, object], told: str) -> None:
    with pytest.raises(SpecError) as caught:
        QuantSpec.model_validate(fields)
    assert told in caught.value.what
    assert "default factory" not in caught.value.what
    assert caught.value.advice


def test_a_change_is_checked_like_a_new_spec() -> None:
    with pytest.raises(SpecError, match=r"must lie in -8\.\.7"):
        INT8_NARROW_WEIGHT.but(dtype="int4")
    with pytest.raises(SpecError, match="a spec has no field 'qmn'") as caught:
        INT8.but(qmn=0)
    assert caught.value.advice is not None
    assert "did you mean qmin" in caught.value.advice


def test_specs_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        INT8.qmin = 0  # type: ignore[misc]


def test_text_that_is_no_spec_is_refused() -> None:
    with pytest.raises(SpecError, match="unknown spec INT88"):
        QuantSpec.parse("INT88")
    with pytest.raises(SpecError, match="is not a spec"):
        QuantSpec.parse("int8,int4")
    with pytest.raises(ParseError):
        QuantSpec.parse("int8{qmin=")


def test_options_of_an_observation_are_a_mapping_outside_and_sorted_inside() -> None:
    left = Observe.model_validate({"name": "fixed", "options": {"zero_point": 3, "scale": 0.5}})
    right = Observe.parse("fixed{scale=0.5 zero_point=3}")
    assert left == right
    assert left.model_dump() == {"name": "fixed", "options": {"scale": 0.5, "zero_point": 3}}
