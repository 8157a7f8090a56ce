"""Changes that let a rule claim a node: each is applied to a copy, is data, and says what it does."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quantc as qc
from quantc.config.config_rule import ConfigRule
from quantc.config.selectors import ByNode, ByOp
from quantc.errors import QuantcError
from quantc.inspect.changes import (
    AddConfigRule,
    AddRule,
    ByHand,
    Cast,
    Change,
    MakeConstant,
    QuantizeInput,
    QuantizeReader,
    RemoveConfigRule,
    RemoveRule,
    SetArgument,
    SingleUser,
    total_cost,
)
from quantc.ir.decisions import Quantize
from quantc.ir.program import Program
from tests.support.by_hand import two_layers
from tests.support.explained import (
    SIMPLE,
    captured,
    explained,
    smallest,
)


def test_remove_config_rules() -> None:
    """Two rules leave the node float; both must go, and a third stays."""
    program = captured(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    config = qc.QuantConfig().set_op("linear", qc.FLOAT).set("1", qc.FLOAT, role="bias").set("0", qc.FLOAT)
    change = smallest(explained(program, "linear", SIMPLE, config), RemoveConfigRule)
    assert [str(rule.select) for rule in change.rules] == ["0", "op linear"]
    after = change.apply(config)
    assert [str(rule.select) for rule in after.rules] == ["1"]
    explained(program, "linear", SIMPLE, after, verdict="quantized")
    with pytest.raises(QuantcError, match="the config has no rule"):
        change.apply(after)


RULE = ConfigRule(select=ByNode(node="linear"), use=Quantize(qc.UINT8))
CHANGES: dict[str, Change[Any]] = {
    "remove-config-rule": RemoveConfigRule("linear", (RULE,)),
    "add-config-rule": AddConfigRule("linear", RULE),
    "set-argument": SetArgument("conv2d", (("padding", (0, 0)), ("groups", 1))),
    "single-user": SingleUser("conv2d", "erf", ("relu",)),
    "cast": Cast(("linear", "relu"), "f32"),
    "make-constant": MakeConstant("linear", "w"),
    "remove-rule": RemoveRule("relu", "conv-relu"),
    "add-rule": AddRule("erf", "erf-alone", "x", (("x", "act"), ("out", "act"))),
    "quantize-input": QuantizeInput("conv2d", RemoveRule("relu", "conv-relu")),
    "quantize-reader": QuantizeReader("erf", AddRule("erf", "erf-alone", "x", (("x", "act"),))),
    "replace-op": ByHand("replace-op", "erf", "write it otherwise"),
}
"""By their kind in data."""
ON = {
    "config": {"remove-config-rule", "add-config-rule"},
    "program": {"set-argument", "single-user", "cast", "make-constant"},
    "backend": {"remove-rule", "add-rule", "quantize-input", "quantize-reader"},
    "model": {"replace-op"},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_is_data_and_text(kind: str) -> None:
    change = CHANGES[kind]
    data = json.loads(json.dumps(change.to_data()))
    assert data["kind"] == kind
    assert kind in ON[data["on"]]
    told = str(change)
    named = [name for name in ("linear", "conv2d", "relu", "erf") if name in json.dumps(data)]
    assert any(name in told for name in named) or kind == "replace-op"


def test_small_changes_come_before_large_ones() -> None:
    order = [
        "remove-config-rule",
        "add-config-rule",
        "single-user",
        "make-constant",
        "remove-rule",
        "add-rule",
        "replace-op",
    ]
    costs = [total_cost(CHANGES[kind]) for kind in order]
    assert costs == sorted(set(costs))


def test_a_change_to_another_node_costs_more_than_the_change_itself() -> None:
    inner = RemoveRule("relu", "conv-relu")
    once = QuantizeInput("conv2d", inner)
    assert total_cost(inner) < total_cost(once) < total_cost(QuantizeReader("erf", once))
    assert (once.on, QuantizeReader("x", RemoveConfigRule("x", ())).on) == ("backend", "config")
    assert once.to_data()["change"] == inner.to_data()


def test_a_rule_is_added_last_where_it_wins() -> None:
    config = qc.QuantConfig().set_node("linear", qc.FLOAT)
    after = AddConfigRule("linear", RULE).apply(config)
    assert after.rules == (*config.rules, RULE)
    assert len(config.rules) == 1
    program = two_layers()
    setting = after.resolve(program).setting(program.node("linear"))
    assert setting is not None
    assert setting.rule == RULE


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (ConfigRule(select=ByNode(node="relu"), use=qc.FLOAT), 'config.set_node("relu", FLOAT)'),
        (
            ConfigRule(select=ByOp(op="matmul"), use=Quantize(qc.UINT8_DYNAMIC)),
            'config.set_op("matmul", UINT8_DYNAMIC)',
        ),
        (ConfigRule(select=ByNode(node="add"), use=Quantize(qc.UINT8)), 'config.set_node("add", UINT8), and calibrate'),
        (
            ConfigRule(select=ByNode(node="add"), use=Quantize(qc.UINT8_DYNAMIC.but(qmax=127))),
            'config.set_node("add", "uint8{',
        ),
    ],
    ids=["float", "op", "static", "other"],
)
def test_a_rule_to_add_is_told_as_the_call_that_adds_it(rule: ConfigRule, told: str) -> None:
    assert str(AddConfigRule("node", rule)).startswith(told)


def test_rules_are_taken_out_of_a_backend_and_added_in_front() -> None:
    assert RemoveRule("conv2d", "conv").apply(SIMPLE).table.names == ("linear", "pool")
    wider = AddRule("erf", "erf-alone", "x", (("x", "act"), ("out", "act"))).apply(SIMPLE)
    assert wider.table.names == ("erf-alone", "conv", "linear", "pool")
    assert SIMPLE.table.names == ("conv", "linear", "pool")
    assert wider.roles == SIMPLE.roles


class Given(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).relu()


def given() -> Program:
    return captured(Given(), torch.randn(2, 4), torch.randn(3, 4))


def test_changes_of_a_program_are_made_to_a_copy() -> None:
    program, x, w = given(), torch.randn(2, 4), torch.randn(3, 4)
    before = program.dump()
    cast = Cast(("linear",), "f64").apply(program)
    torch.testing.assert_close(cast(x, w), program(x, w))
    stored = MakeConstant("linear", "w").apply(program, w)
    torch.testing.assert_close(stored(x, torch.zeros(3, 4)), program(x, w))
    with pytest.raises(QuantcError, match="users"):
        SingleUser("linear", "erf", ("relu",)).apply(program)
    assert program.dump() == before


def test_what_is_to_be_done_by_hand_is_not_done() -> None:
    with pytest.raises(QuantcError, match="write it otherwise") as caught:
        CHANGES["replace-op"].apply(given())
    assert caught.value.where == "erf"


def test_a_change_is_a_value() -> None:
    assert SetArgument("a", (("b", 1),)) == SetArgument("a", (("b", 1),))
    with pytest.raises(FrozenInstanceError):
        CHANGES["cast"].dtype = "f16"  # type: ignore[attr-defined]
