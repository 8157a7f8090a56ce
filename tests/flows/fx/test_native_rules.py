"""What FX graph mode quantizes: a rule table of ops that read and yield quantized tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.flows.fx.custom_config import QuantType
from quantc.flows.fx.native_rules import FIXED_RULES, KINDS, NATIVE, TABLE
from quantc.ir.decisions import Fixed
from tests.support.activation_grids import Of


def rules_for(model: nn.Module, *shape: int) -> list[str]:
    """The rules that take the ops of a model."""
    program = qc.capture(model.eval(), (torch.randn(shape),), method="fx")
    return sorted(match.rule.name for match in TABLE.match(program))


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda x: x + 1.5, "add-number"),
        (lambda x: x * x, "mul"),
        (lambda x: torch.relu(x + x), "add"),
        (lambda x: torch.matmul(x, x), "matmul"),
        (F.hardswish, "activation"),
        (torch.tanh, "tanh"),
        (lambda x: torch.softmax(x, -1), "softmax"),
        (lambda x: x.clamp(0, 1), "clamp"),
        (lambda x: x.mean(-1), "pool"),
        (lambda x: x.reshape(-1), "move"),
        (lambda x: torch.cat([x, x]), "cat"),
        (lambda x: torch.stack([x, x]), "stack"),
    ],
)
def test_an_op_is_taken_by_one_rule(function: Callable[[Tensor], Tensor], rule: str) -> None:
    assert rules_for(Of(function), 4, 4) == [rule]


def test_a_layer_takes_the_relu_behind_it() -> None:
    assert rules_for(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()), 1, 2, 3, 3) == ["conv"]
    assert rules_for(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sigmoid()), 1, 2) == ["linear", "sigmoid"]


def test_what_has_no_quantized_kernel_is_left() -> None:
    assert rules_for(Of(torch.sin), 2, 2) == []
    assert rules_for(Of(lambda x: x / x), 2, 2) == []


def test_ranges_that_are_known_hold_all_that_the_functions_yield() -> None:
    x = torch.linspace(-40, 40, 1001)
    for role, made in (("unit", torch.sigmoid(x)), ("signed-unit", torch.tanh(x))):
        fixed = NATIVE.outcome(role)
        assert isinstance(fixed, Fixed)
        levels = torch.round(made / fixed.scale) + fixed.zero_point
        assert levels.min() >= 0
        assert levels.max() <= 256  # one is the level above the last, and rounds down to it
        assert float((levels.clamp(0, 255) - fixed.zero_point).mul(fixed.scale).sub(made).abs().max()) <= fixed.scale


def test_kinds_and_ranges_are_said_of_rules_that_there_are() -> None:
    names = {rule.name for rule in TABLE.rules}
    assert set(KINDS) <= names
    assert set(FIXED_RULES) <= names
    assert KINDS["linear"] == (QuantType.STATIC, QuantType.DYNAMIC)
    assert {rule.name for rule in TABLE.rules if rule.roles.get("out") in ("unit", "signed-unit")} == set(FIXED_RULES)


def test_roles_of_rules_are_known_to_the_backend() -> None:
    said = {role for rule in TABLE.rules for role in rule.roles.values()}
    plain = {role for role in said if not role.startswith("like ") and role != "pass"}
    assert {role.rstrip("?") for role in plain} <= set(NATIVE.roles)
