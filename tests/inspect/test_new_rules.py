"""Rules for a single op, made for a backend that has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.annotate.reasons import Reasons
from quantc.inspect.changes import (
    AddRule,
)
from quantc.inspect.new_rules import rule_for
from quantc.ir.program import Program
from quantc.patterns.table import RuleTable
from quantc.spec.spec import INT8_WEIGHT
from tests.support.explained import (
    SIMPLE,
    Erf,
    backend,
    captured,
    explained,
    smallest,
)


def test_add_a_rule() -> None:
    program = captured(nn.Sequential(nn.Linear(4, 4), nn.Softplus()), torch.randn(2, 4))
    change = smallest(explained(program, "softplus", SIMPLE), AddRule)
    wider = change.apply(SIMPLE)
    assert len(wider.table) == len(SIMPLE.table) + 1
    found = explained(program, "softplus", wider, verdict="quantized")
    assert found.row.rule == change.rule
    run_through(program, wider, torch.randn(2, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.maximum(x, x + 1),
        lambda x: torch.cumsum(x, 1),
        lambda x: F.layer_norm(x, (4,), torch.ones(4), torch.zeros(4)),
        lambda x: torch.where(x > 0, x, -x),
    ],
    ids=["cat", "maximum", "cumsum", "layer_norm", "where"],
)
def test_an_added_rule_takes_ops_of_every_shape(function: Any) -> None:
    class Wrap(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = function(x)
            return result

    program = captured(Wrap(), torch.randn(2, 4))
    node = [node for node in program.graph.nodes if node.op == "call_function"][-1].name
    change = next(change for change in explained(program, node, SIMPLE).changes if isinstance(change, AddRule))
    explained(program, node, change.apply(SIMPLE), verdict="quantized")


def run_through(program: Program, given: Backend, x: Tensor) -> None:
    """Calibrate and convert, and stay near the float program."""
    prepared = qc.prepare(program, given)
    qc.calibrate(prepared, [x])
    expected, found = program(x).detach(), qc.convert(prepared)(x).detach()
    assert float((expected - found).norm() / expected.norm()) < 0.05


def test_an_input_of_the_program_feeds_nothing_so_a_rule_is_added() -> None:
    program = captured(nn.Sequential(nn.MaxPool2d(2), Erf()), torch.randn(1, 2, 8, 8))
    change = smallest(explained(program, "max_pool2d", SIMPLE), AddRule)
    assert dict(change.roles) == {"x": "act", "out": "like x"}
    explained(program, "max_pool2d", change.apply(SIMPLE), verdict="quantized")


def made(function: Any, given: Backend, *inputs: Tensor) -> AddRule | None:
    """The rule for the last op of a function."""

    class Wrap(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return function(*args)

    prepared = qc.prepare(captured(Wrap(), *inputs), given, allow_empty=True)
    (trial,) = Reasons(prepared).trials.tables
    *_, last = (node for node in prepared.graph.nodes if node.op == "call_function")
    return rule_for(last, trial)


WEIGHT = torch.ones(3, 4)
RULES: dict[str, tuple[Any, str, dict[str, str]]] = {
    "one operand": (torch.erf, "x", {"x": "act", "out": "act"}),
    "two operands": (lambda x: torch.maximum(x, -x), "x y", {"x": "act", "y": "act", "out": "act"}),
    "a number": (lambda x: x + 1.5, "x", {"x": "act", "out": "act"}),
    "a list": (lambda x: torch.cat([x, x]), "xs*", {"xs": "act", "out": "like xs"}),
    "a move": (lambda x: x.transpose(0, 1), "x", {"x": "act", "out": "like x"}),
    "a weight": (lambda x: F.linear(x, WEIGHT), "x w", {"x": "act", "w": "weight", "out": "act"}),
    "a mask": (lambda x: torch.where(x > 0, x, -x), "_ x y", {"x": "act", "y": "act", "out": "act"}),
}


@pytest.mark.parametrize("case", RULES)
def test_operands_that_hold_floats_get_roles(case: str) -> None:
    function, args, roles = RULES[case]
    found = made(function, backend(), torch.randn(2, 4))
    assert found is not None
    assert (found.args, dict(found.roles)) == (args, roles)


def test_ops_without_floats_and_backends_without_activations_get_no_rule() -> None:
    assert made(lambda x: x + 1, backend(), torch.arange(4)) is None
    assert made(torch.erf, Backend("own", RuleTable("own", ()), roles={"weight": INT8_WEIGHT}), torch.randn(4)) is None


def test_a_name_that_is_taken_gets_a_number() -> None:
    first = made(torch.erf, backend(), torch.randn(4))
    assert first is not None
    assert first.rule == "erf-alone"
    renamed = AddRule("sin", "erf-alone", "x", (("x", "act"), ("out", "act"))).apply(backend())
    second = made(torch.erf, renamed, torch.randn(4))
    assert second is not None
    assert second.rule == "erf-alone-2"
    both = AddRule("cos", "erf-alone-2", "x", (("x", "act"), ("out", "act"))).apply(renamed)
    third = made(torch.erf, both, torch.randn(4))
    assert third is not None
    assert third.apply(both).table.names == ("erf-alone-3", "erf-alone-2", "erf-alone")
