"""Decisions about tensors: values that compare, hash, print, and round-trip as JSON; faulty ones are refused."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from quantc.errors import SpecError
from quantc.ir.decisions import FLOAT, OUTCOMES, Derived, Fixed, Float, Quantize, SameAs, TensorOutcome
from quantc.ir.sites import Site
from quantc.spec.spec import INT8, INT8_WEIGHT, UINT8

OUTCOME_VALUES: list[TensorOutcome] = [
    Quantize(INT8),
    SameAs(Site("", "conv2d", out=0)),
    SameAs(Site("true_graph_0", "add", operand=1)),
    Derived((Site("", "linear", operand=0), Site("", "linear", operand=1))),
    Fixed(1 / 256, 0, UINT8),
    Float("a mask"),
    FLOAT,
]


@pytest.mark.parametrize("outcome", OUTCOME_VALUES, ids=str)
def test_outcomes_are_values_and_round_trip(outcome: TensorOutcome) -> None:
    again = OUTCOMES.validate_json(OUTCOMES.dump_json(outcome))
    assert again == outcome
    assert hash(again) == hash(outcome)


def test_outcomes_read_well() -> None:
    assert str(Quantize(INT8_WEIGHT)) == "quantize as INT8_WEIGHT"
    assert str(SameAs(Site("", "conv2d", out=0))) == "same as conv2d:out0"
    assert str(Float("a mask")) == "float: a mask"


def test_faulty_outcomes_are_refused() -> None:
    with pytest.raises(SpecError, match="scale: it must be a positive finite number"):
        Fixed(0.0, 0, UINT8)
    with pytest.raises(SpecError, match=r"zero_point: it must lie in 0..255 \(given: -1\)"):
        Fixed(0.5, -1, UINT8)
    with pytest.raises(SpecError, match="per-tensor"):
        Fixed(0.5, 0, INT8_WEIGHT)
    with pytest.raises(SpecError, match="of 1 sites is not defined"):
        Derived((Site("", "linear", operand=0),))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_fixed_scale_is_a_positive_number(scale: float) -> None:
    with pytest.raises(SpecError, match="scale"):
        Fixed(scale, 0, UINT8)


def test_the_ends_of_the_grid_are_zero_points() -> None:
    assert [Fixed(0.5, zero_point, INT8).zero_point for zero_point in (-128, 127)] == [-128, 127]
    with pytest.raises(SpecError, match="zero_point"):
        Fixed(0.5, 128, INT8)


def test_what_is_read_must_be_one_of_the_decisions() -> None:
    with pytest.raises(ValidationError, match="guess"):
        OUTCOMES.validate_python({"kind": "guess"})
    with pytest.raises(ValidationError, match="why"):
        OUTCOMES.validate_python({"kind": "float", "why": "an unknown field"})
    assert OUTCOMES.validate_json('{"kind": "float"}') == FLOAT


def test_a_fixed_scale_has_the_bits_of_its_spec() -> None:
    assert Fixed(1 / 256, 0, INT8.but(scale_bits=1)).scale == 1 / 256
    assert Fixed(0.01, 0, INT8).scale == 0.01
    with pytest.raises(SpecError, match=r"more significant bits than the spec gives it \(scale_bits=1\)") as caught:
        Fixed(0.01, 0, INT8.but(scale_bits=1))
    assert caught.value.advice == "fix a power of two"
    with pytest.raises(SpecError, match="scale_bits=2"):
        Fixed(0.3125, 0, INT8.but(scale_bits=2))
