"""Explain: the nearest rule, why it refused, and the smallest change after which it fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import quantc as qc
from quantc.cli.app import app
from quantc.errors import QuantcError
from quantc.inspect.changes import (
    SetArgument,
)
from quantc.inspect.coverage import Verdict
from quantc.patterns import aten
from quantc.patterns.table import Rule
from tests.support.explained import (
    PRODUCT,
    SIMPLE,
    Erf,
    backend,
    captured,
    conv,
    explained,
)


def test_a_quantized_node_says_which_rule_took_it() -> None:
    program = captured(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    found = explained(program, "linear", SIMPLE, verdict="quantized")
    assert found.nearest is not None
    assert found.nearest.matched
    assert found.changes == ()
    assert found.verdict is Verdict.QUANTIZED


def test_what_is_no_op_is_refused_with_the_ops_around_it() -> None:
    prepared = qc.prepare(captured(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)), SIMPLE)
    with pytest.raises(QuantcError, match="input_1 is placeholder") as caught:
        prepared.explain("input_1")
    assert "linear" in str(caught.value.advice)


def test_explanations_survive_convert_and_take_nodes_too() -> None:
    x = torch.randn(1, 2, 8, 8)
    program = captured(nn.Sequential(nn.Conv2d(2, 2, 1), nn.MaxPool2d(2), Erf()), x)
    prepared = qc.prepare(program, SIMPLE)
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    for name in ("conv2d", "max_pool2d", "erf"):
        assert quantized.explain(name).to_data() == prepared.explain(name).to_data()
        assert prepared.explain(prepared.node(name)).to_data() == prepared.explain(name).to_data()
    with pytest.raises(QuantcError, match="quantized already"):
        SetArgument("conv2d", (("groups", 1),)).apply(quantized)


def test_every_rule_tried_has_its_cause_as_data() -> None:
    program = captured(nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.ReLU()), torch.randn(1, 4, 4, 4))
    table = backend(
        Rule("conv-relu", conv(groups=1) >> aten.relu, PRODUCT),
        Rule("conv-tanh", conv() >> aten.tanh, PRODUCT),
    )
    data = json.loads(explained(program, "conv2d", table).to_json())
    assert data["nearest"] == "conv-relu"
    assert data["constraint"] == {
        "kind": "wrong-arguments",
        "node": "conv2d",
        "faults": [{"argument": "groups", "found": 2, "wanted": "== 1"}],
    }
    assert [row["rule"] for row in data["tried"]] == ["conv-relu", "conv-tanh"]
    assert all(row["cause"]["kind"] for row in data["tried"])


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_prepares_for_a_backend_and_explains() -> None:
    command = ["explain", "quantc.cli.example:digits_cnn", "conv2d", "--backend", "x86"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.stderr
    assert "quantized, by conv of x86" in told.stdout
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (data["verdict"], data["rule"], data["change"]) == ("quantized", "conv", None)


def test_the_command_line_explains_a_saved_program_without_a_backend(tmp_path: Path) -> None:
    program = captured(nn.Sequential(nn.Linear(4, 4), nn.LogSigmoid()), torch.randn(2, 4))
    qc.prepare(program, "x86").save(tmp_path / "prepared.qc")
    told = CliRunner().invoke(app, ["explain", str(tmp_path / "prepared.qc"), "log_sigmoid", "--json"])
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["change"]["kind"] == "add-rule"
