"""Numeric checks of the kit: fidelity, fixed ranges, the channel axis, batches of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantc.testing.number_checks import _whole_slices, batches, channels, fidelity, fixed_range, ties
from tests.support.trials import BY_NAME, faulty_trial, good_trial

CHECKS: tuple[Any, ...] = (fidelity, fixed_range, ties, channels, batches)


@pytest.mark.parametrize("rule", ["linear", "conv-transpose", "sigmoid", "matmul"])
def test_nothing_is_said_against_a_good_rule(rule: str) -> None:
    trial = good_trial(rule)
    assert {check.__name__: found for check in CHECKS if (found := check(trial))} == {}


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (fidelity, "range-too-wide"),
        (fidelity, "weight-scales-too-large"),
        (fixed_range, "wrong-zero-point"),
        (fixed_range, "unsigned-for-signed"),
        (fixed_range, "range-too-small"),
        (ties, "product-like-its-input"),
        (ties, "linear-like-its-input"),
        (channels, "wrong-axis"),
        (channels, "wrong-axis-of-transposed-conv"),
    ],
)
def test_a_fault_is_found_by_the_check_it_is_for(check: Any, name: str) -> None:
    faults = check(faulty_trial(name))
    assert faults
    assert BY_NAME[name].says in faults[0].what
    assert faults[0].advice


def test_checks_that_have_nothing_to_look_at_say_so() -> None:
    assert fixed_range(good_trial("add")) is None, "its grid is not known beforehand"
    assert ties(good_trial("add")) is None
    assert ties(good_trial("cat")) is None, "it only moves values"
    assert channels(good_trial("add")) is None


def test_the_advice_for_a_fixed_range_is_the_scale_it_needs() -> None:
    faults = fixed_range(faulty_trial("range-too-small"))
    assert faults
    (fault,) = faults
    assert "0.0039" in fault.advice  # 1 / 255


def test_slices_are_whole_along_any_axis() -> None:
    same = torch.tensor([[True, False, True], [True, True, False]])
    assert _whole_slices(same).tolist() == [[True, False, False], [True, False, False]]
    assert _whole_slices(torch.tensor([True, False])).tolist() == [True, False]
