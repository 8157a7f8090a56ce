"""QNNPACK: every op of the table reads and yields uint8, so that whole regions compute on integers."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.backends.qnnpack import QNNPACK
from quantc.ir.decisions import Fixed, Quantize
from quantc.ir.dialect import op_name
from quantc.spec.spec import UINT8
from tests.support.backend_cases import captured, decided


def test_known_ranges_are_fixed_and_survive_a_config_for_everything() -> None:
    program = captured(lambda self, x: self.fc(x).sigmoid(), torch.randn(2, 8), fc=nn.Linear(8, 8))
    expected = Fixed(1 / 256, 0, UINT8)
    site = "sigmoid:out0"
    for config in (qc.QuantConfig(), qc.QuantConfig().set_all(UINT8.but(observe="minmax"))):
        outcomes = qc.prepare(program, "qnnpack", config=config).plan.outcomes
        assert {str(place): outcome for place, outcome in outcomes.items()}[site] == expected
    narrow = UINT8.but(qmax=127)
    outcomes = qc.prepare(program, "qnnpack", config=qc.QuantConfig().set_all(narrow)).plan.outcomes
    assert {str(place): outcome for place, outcome in outcomes.items()}[site] == Quantize(narrow)


def test_recurrent_ops_keep_biases_and_state_float() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 5)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
            return self.lstm(x, (h, c))

    state = torch.zeros(1, 2, 5)
    prepared = qc.prepare(qc.capture(Recurrent().eval(), (torch.randn(3, 2, 8), state, state)), "qnnpack")
    node = next(node for node in prepared.graph.nodes if op_name(node) == "lstm")
    values = {prepared.node(site.node) for group in prepared.plan.groups for site in group.values}
    weights = [value for value in values if value.op == "get_attr"]
    assert sorted(value.meta["val"].shape for value in weights) == [(20, 5), (20, 8)]
    assert {value.name for value in values if value.op == "placeholder"} == {"x"}
    assert all(user not in values for user in node.users if user.target is operator.getitem)


def test_every_rule_that_reads_numbers_yields_quantized_ones() -> None:
    """Layers with a state, and tables, are the only ones to end in float."""
    float_ends = {rule.name for rule in QNNPACK.table if "out" not in rule.roles}
    assert float_ends == {
        *("embedding", "embedding-bag", "lstm", "gru", "rnn", "lstm-cell", "gru-cell", "rnn-cell"),
    }
    assert not any(rule.roles["out"].endswith("?") for rule in QNNPACK.table if "out" in rule.roles)


def test_a_block_is_one_region_of_bytes() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return F.layer_norm(F.gelu(self.a(x)) * 0.5, (8,)).softmax(-1)

    rules, sites = decided(captured(run, torch.randn(2, 8), a=nn.Linear(8, 8)), "qnnpack")
    names = {"linear": "linear", "gelu": "activation", "mul": "mul-number", "layer_norm": "layer-norm"}
    assert rules == {**names, "softmax": "softmax"}
    assert {f"{node}:out0" for node in rules} <= sites


@pytest.mark.parametrize(
    ("name", "act", "low", "high"),
    [("sigmoid", torch.sigmoid, 0.0, 255 / 256), ("tanh", torch.tanh, -1.0, 127 / 128)],
)
def test_ranges_known_beforehand_reach_as_far_as_the_results(name: str, act: Any, low: float, high: float) -> None:
    program = captured(lambda self, x: act(self.a(x)), torch.randn(2, 8), a=nn.Linear(8, 8))
    outcomes = {str(site): found for site, found in qc.prepare(program, "qnnpack").plan.outcomes.items()}
    fixed = outcomes[f"{name}:out0"]
    assert isinstance(fixed, Fixed)
    levels = torch.tensor([0, 255]) - fixed.zero_point
    assert (levels * fixed.scale).tolist() == [low, high]


def test_arithmetic_with_numbers_goes_by_rules_of_its_own() -> None:
    def run(self: Any, x: Tensor) -> Any:
        return (3 - self.a(x)) / 2 - 1 + 4

    rules, _ = decided(captured(run, torch.randn(2, 8), a=nn.Linear(8, 8)), "qnnpack")
    assert [rules[node] for node in ("rsub", "div", "sub", "add")] == [
        *("sub-from-number", "div-number", "sub-number", "add-number")
    ]
