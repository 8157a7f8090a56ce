"""Where quantize and dequantize ops stand, and with which numbers, against what the table says."""

from __future__ import annotations

from typing import Any

import pytest

from quantc.testing import placement_checks
from quantc.testing.placement_checks import bias, operands, placed, sharing, zero
from tests.support.faulty_backends import GOOD
from tests.support.trials import BY_NAME, faulty_trial, good_trial, trials

CHECKS: tuple[Any, ...] = (operands, placed, zero, sharing, bias)


@pytest.mark.parametrize("rule", ["conv", "linear", "add", "cat", "max-pool", "sigmoid"])
def test_nothing_is_said_against_a_good_rule(rule: str) -> None:
    trial = good_trial(rule)
    assert {check.__name__: check(trial) for check in CHECKS if check(trial)} == {}


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (operands, "weight-as-bias"),
        (operands, "weight-as-activation"),
        (operands, "bias-as-activation"),
        (placed, "bias-of-nothing"),
        (zero, "symmetric-off-centre"),
        (sharing, "cat-does-not-share"),
        (sharing, "pool-does-not-share"),
        (sharing, "reshape-requantizes"),
    ],
)
def test_a_fault_is_found_by_the_check_it_is_for(check: Any, name: str) -> None:
    faults = check(faulty_trial(name))
    assert faults
    assert BY_NAME[name].says in faults[0].what
    assert faults[0].advice


def test_checks_that_have_nothing_to_look_at_say_so() -> None:
    assert sharing(good_trial("add")) is None, "nothing in it is alike"
    assert bias(good_trial("add")) is None
    assert bias(good_trial("linear")) == []


def test_scales_that_were_moved_after_converting_are_found() -> None:
    """The converted program is changed by hand: a bias off its grid, a zero point out of range."""
    trial = trials(GOOD, "linear")[0]
    program = trial.converted
    (dequantize,) = [node for node in program.nodes() if node.name.startswith("dequantize") and _reads(node, "b")]
    scale: Any = dequantize.args[1]
    tensor = program.tensor(scale)
    assert tensor is not None
    tensor.data.mul_(2)
    faults = bias(trial)
    assert faults
    (fault,) = faults
    assert "scale of b" in fault.what


def _reads(node: Any, name: str) -> bool:
    return any(source.op == "get_attr" and str(source.target).startswith(name) for source in node.all_input_nodes)


def test_a_zero_point_out_of_its_range_is_found() -> None:
    trial = trials(GOOD, "add")[0]
    node = next(node for node in trial.converted.nodes() if "quantize_per_tensor" in str(node.target))
    node.args = (node.args[0], node.args[1], 300, *node.args[3:])
    faults = zero(trial) or []
    assert any(node.name in fault.what and "0..255" in fault.what for fault in faults)
    node.args = (node.args[0], float("inf"), 0, *node.args[3:])
    assert any("positive" in fault.what for fault in placement_checks.zero(trial) or [])
