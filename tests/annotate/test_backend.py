"""A backend as data: its roles, the specs it can run, and what is refused when it is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

import quantc as qc
from quantc.errors import AnnotationError, PatternError, UnknownNameError
from quantc.ir.decisions import Fixed, Quantize
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule
from quantc.spec.capability import Capability
from quantc.spec.spec import INT8, INT8_WEIGHT, UINT8
from tests.support.hand_quantizers import TANH, table
from tests.support.small_backend import SMALL


@pytest.mark.parametrize(
    ("roles", "says", "close"),
    [
        pytest.param({"x": "acts", "out": "act"}, "gives 'x' the role 'acts'", "did you mean act", id="unknown-role"),
        pytest.param({"x": "act", "out": "like y"}, "gives 'out' the role 'like y'", "like x", id="like-nothing"),
        pytest.param({"x": "act", "out": "like out"}, "gives 'out' the role 'like out'", "like x", id="like-itself"),
        pytest.param(
            {"x": "act?", "out": "act"}, "gives 'x' the role 'act?'", "did you mean act", id="demand-of-input"
        ),
        pytest.param({"y": "act"}, "gives 'y' a role but binds no such name", "x", id="unknown-name"),
    ],
)
def test_unknown_roles_are_refused_when_the_backend_is_made(roles: dict[str, str], says: str, close: str) -> None:
    with pytest.raises(PatternError) as caught:
        table("wrong", Rule("one", op("relu", args="x"), roles))
    assert says in caught.value.what
    assert close in str(caught.value.advice)


def test_a_role_that_a_backend_does_not_have_cannot_be_changed() -> None:
    with pytest.raises(AnnotationError, match="backend 'right' has no role 'weights'"):
        table("right", TANH).but(weights=qc.INT8_WEIGHT)


def test_a_role_stands_for_a_spec_or_for_fixed_qparams() -> None:
    assert SMALL.outcome("act") == Quantize(UINT8)
    assert SMALL.outcome("act?") == SMALL.outcome("act")
    assert SMALL.outcome("unit") == Fixed(1 / 256, 0, UINT8)
    with pytest.raises(KeyError):
        SMALL.outcome("like x")


def test_without_a_list_it_can_run_the_specs_of_its_roles_alone() -> None:
    assert SMALL.why_not(UINT8) is None
    assert SMALL.why_not(INT8_WEIGHT) is None
    assert SMALL.why_not(UINT8.but(qmax=127)) is None  # within the range
    assert "dtype must be uint8, not int8" in str(SMALL.why_not(INT8))
    assert "granularity" in str(SMALL.why_not(INT8_WEIGHT.but(granularity="per-tensor")))


def test_a_list_of_what_it_takes_replaces_that() -> None:
    backend = replace(SMALL, takes=(Capability.of(INT8),))
    assert backend.capabilities == (Capability.of(INT8),)
    assert backend.why_not(INT8) is None
    assert "dtype must be int8" in str(backend.why_not(UINT8))
    assert "not weight" in str(backend.why_not(INT8_WEIGHT))


def test_a_changed_role_is_that_of_another_backend() -> None:
    changed = SMALL.but(act=INT8)
    assert changed.outcome("act") == Quantize(INT8)
    assert changed.outcome("weight") == SMALL.outcome("weight")
    assert SMALL.outcome("act") == Quantize(UINT8)
    assert (changed.name, changed.table) == (SMALL.name, SMALL.table)
    assert changed.why_not(INT8) is None


def test_an_instruction_set_that_nobody_has_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="avx3"):
        replace(SMALL, instruction_set="avx3")


def test_the_text_counts_the_rules() -> None:
    assert str(SMALL) == f"small: {len(list(SMALL.table))} rules"
