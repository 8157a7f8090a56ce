"""Which quantized ops a delegate computes on integers, which in float, and which run outside."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

import quantc as qc
from quantc.qdq.registration import decomposed_ops
from quantc.targets.executorch.delegation import (
    MAX_ROWS,
    Delegation,
    DelegationRow,
    RunsOn,
    _places,
    _worst,
    is_constant,
    is_scaling,
    misread,
)
from quantc.targets.executorch.partitioning import IMPLICIT, give_name
from tests.support.executorch_models import (
    STEP,
    conv,
    image,
    net,
    static,
    steps,
)


@pytest.mark.slow
def test_the_delegation_says_what_fell_back_and_why() -> None:
    quantized = static(net(lambda self, x: self.b(nn.functional.gelu(self.a(x))), a=conv(), b=conv()), image())
    lowered = qc.lower(quantized, "executorch", partitioners=[])
    delegation = lowered.delegation()
    assert delegation.fraction == 0
    assert delegation.delegates == 0
    assert {row.place for row in delegation.rows} == {RunsOn.PORTABLE}
    assert all(row.why for row in delegation.rows)
    assert "0 of 2 quantized ops" in str(delegation)
    data = json.loads(delegation.to_json())
    assert data["taken"] == 0
    assert {row["node"] for row in data["ops"]} == {"conv2d", "conv2d_1"}
    assert max(steps(quantized, lowered, image())) <= STEP


def row(node: str, place: RunsOn, why: str = "") -> DelegationRow:
    return DelegationRow(node, "conv2d", "conv", f"net.{node}", place, why)


ROWS = (
    row("taken", RunsOn.DELEGATE),
    row("in_float", RunsOn.DELEGATE_FLOAT, "no rule"),
    row("own", RunsOn.KERNEL),
    row("outside", RunsOn.PORTABLE, "no kernel"),
    row("gone", RunsOn.GONE),
)
FOUND = Delegation("Net", ROWS, 2, ("aten.erf.default",))


def test_what_is_taken_and_what_fell_back() -> None:
    assert [each.node for each in FOUND.taken] == ["taken", "gone"]
    assert [each.node for each in FOUND.fallen_back] == ["in_float", "outside"], "a kernel of its own reads integers"
    assert FOUND.fraction == 0.4
    assert Delegation("Net", (), 0).fraction == 1.0
    assert FOUND.row("own") is ROWS[2]
    assert FOUND.row("nobody") is None


def test_it_prints_what_fell_back_first() -> None:
    head, others, columns, *rows = str(FOUND).splitlines()
    assert head == "Net: 2 of 5 quantized ops on integers in 2 delegates"
    assert "aten.erf.default" in others
    assert columns.split()[0] == "node"
    assert [each.split()[0] for each in rows] == ["in_float", "outside", "taken", "own", "gone"]
    many = replace(FOUND, rows=tuple(row(f"n{index}", RunsOn.DELEGATE) for index in range(MAX_ROWS + 2)))
    assert "… and 2 more" in str(many)
    assert replace(FOUND, delegates=1).headline.endswith("in 1 delegate")
    assert "batch is 2" in str(replace(FOUND, sizes="batch is 2"))


def test_it_is_json() -> None:
    data = json.loads(FOUND.to_json())
    assert (data["taken"], data["delegates"], data["fraction"], data["portable"]) == (2, 2, 0.4, ["aten.erf.default"])
    assert data["ops"][1] == {
        "node": "in_float", "op": "conv2d", "rule": "conv", "module": "net.in_float",
        "place": "delegate, in float", "why": "no rule",
    }  # fmt: skip


def test_an_op_that_became_several_is_where_the_worst_is() -> None:
    assert _worst({RunsOn.DELEGATE, RunsOn.PORTABLE, RunsOn.GONE}) is RunsOn.PORTABLE
    assert _worst({RunsOn.DELEGATE, RunsOn.DELEGATE_FLOAT}) is RunsOn.DELEGATE_FLOAT
    assert _worst([RunsOn.GONE, RunsOn.DELEGATE]) is RunsOn.DELEGATE


class Delegated:
    """The graph of a delegate: x is dequantized, read by an op, whose result another op reads."""

    def __init__(self, *, is_part: bool) -> None:
        ops, self.graph = decomposed_ops(), fx.Graph()
        self.x = self.graph.placeholder("x")
        grid = (0.1, 0, -128, 127, torch.int8)
        self.levels = self.graph.call_function(ops.quantize_per_tensor.default, (self.x, *grid))
        self.back = self.graph.call_function(ops.dequantize_per_tensor.default, (self.levels, *grid))
        self.first = self.graph.call_function(torch.ops.aten.relu.default, (self.back,))
        self.second = self.graph.call_function(torch.ops.aten.neg.default, (self.first,))
        give_name(self.first, "relu")
        give_name(self.second, "neg")
        give_name(self.back, "back")
        self.back.meta[IMPLICIT] = is_part

    def manager(self, *outputs: fx.Node) -> Any:
        """As ExecuTorch has it: a module that holds what was lowered."""
        self.graph.output(outputs)
        part = torch.nn.Module()
        object.__setattr__(part, "original_module", SimpleNamespace(graph=self.graph))
        top = torch.nn.Module()
        top.add_module("lowered", part)
        return SimpleNamespace(exported_program=lambda: SimpleNamespace(graph_module=top))


def test_ops_are_on_integers_where_all_they_read_is() -> None:
    assert dict(_places(Delegated(is_part=True).graph)) == {"relu": RunsOn.DELEGATE, "neg": RunsOn.DELEGATE}
    assert dict(_places(Delegated(is_part=False).graph)) == {
        "relu": RunsOn.DELEGATE_FLOAT,
        "neg": RunsOn.DELEGATE_FLOAT,
    }


def test_a_dequantize_op_that_is_part_of_an_op_and_read_by_others_is_found() -> None:
    made = Delegated(is_part=True)
    assert misread(made.manager(made.second, made.back)) == "back"
    made = Delegated(is_part=True)
    assert misread(made.manager(made.second)) == ""
    made = Delegated(is_part=False)
    assert misread(made.manager(made.second, made.back)) == ""


def test_ops_that_scale_and_constants_are_known() -> None:
    made = Delegated(is_part=True)
    assert [is_scaling(node) for node in (made.x, made.levels, made.back, made.first)] == [False, True, True, False]
    chosen = made.graph.call_function(decomposed_ops().choose_qparams.tensor, (made.x, -128, 127, 1e-5, torch.int8))
    item = made.graph.call_function(operator.getitem, (chosen, 0))
    assert is_scaling(item)
    assert not is_scaling(made.graph.call_function(operator.getitem, (made.second, 0)))
    assert [is_constant(node) for node in (made.x, made.first)] == [True, False]
