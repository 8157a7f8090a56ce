"""Changes to a config that quantize a node by another technique than the one that was asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

import quantc as qc
from quantc.inspect.changes import AddConfigRule, Change, RemoveConfigRule
from quantc.inspect.coverage import Verdict
from quantc.ir.program import Program
from tests.support.techniques import attending_program, in_mode


@pytest.fixture(scope="module", name="attending")
def _attending() -> Program:
    return attending_program()


CHANGES = [
    ("dynamic", "x86", "matmul", 'config.set_op("matmul", ', "dynamic"),
    ("dynamic", "x86", "matmul", 'config.set_node("matmul", "uint8{timing=dynamic', "dynamic"),
    ("dynamic", "x86", "matmul_1", 'config.set_node("matmul_1", "uint8{observe=mse}")', "static"),
    ("dynamic", "x86", "relu", 'config.set_node("linear_1", "uint8{observe=mse}")', "static"),
    ("dynamic", "qnnpack", "add", 'config.set_node("add", "uint8{observe=mse}")', "static"),
    ("dynamic", "x86", "transpose_1", "remove from the config: everything: quantize as uint8", "static"),
    ("weight-only", "x86", "matmul", 'config.set_node("matmul", "uint8{observe=mse}")', "static"),
    ("weight-only", "x86", "relu", "remove from the config: everything: quantize as int8", "static"),
    ("weight-only", "x86", "transpose_1", "remove from the config: everything: quantize as int8", "static"),
]


@pytest.mark.parametrize(("mode", "backend", "node", "says", "technique"), CHANGES)
def test_a_change_to_the_config_does_what_it_says(
    mode: str, backend: str, node: str, says: str, technique: str, attending: Program
) -> None:
    prepared, config = in_mode(attending, mode, backend)
    explanation = prepared.explain(node)
    assert explanation.verdict is Verdict.FLOAT
    change = next(change for change in explanation.changes if str(change).startswith(says))
    assert isinstance(change, AddConfigRule | RemoveConfigRule)
    assert change.to_data() in json.loads(explanation.to_json())["changes"]
    again = qc.prepare(attending, backend, config=change.apply(config))
    row = again.coverage().row(node)
    assert row is not None
    assert (row.verdict is not Verdict.FLOAT, row.technique) == (True, technique)


def test_every_change_that_is_offered_lets_a_rule_take_the_node(attending: Program) -> None:
    for mode in ("dynamic", "weight-only"):
        for backend in ("x86", "qnnpack"):
            prepared, config = in_mode(attending, mode, backend)
            for row in prepared.coverage().rows_for("float"):
                for change in prepared.explain(row.node).changes:
                    helped = _after(change, attending, backend, config).coverage().row(row.node)
                    assert helped is not None
                    assert helped.verdict is not Verdict.FLOAT, f"{mode} {backend} {row.node}: {change}"


def _after(change: Change[Any], program: Program, backend: str, config: qc.QuantConfig) -> Program:
    assert change.on == "config", str(change)
    return qc.prepare(program, backend, config=change.apply(config))
