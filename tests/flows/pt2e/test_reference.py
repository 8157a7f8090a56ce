"""A converted graph as a Program, and its integer form."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import quantc as qc
from quantc.flows.pt2e import (
    convert_pt2e,
    prepare_pt2e,
    to_program,
)
from quantc.ir.dialect import op_name
from tests.support.custom_quantizer import CustomQuantizer, Network
from tests.support.oracles import Batches, sqnr
from tests.support.pt2e_runs import quantized
from tests.support.pt2e_small import Net, by_name, captured


def test_coverage_says_what_a_quantizer_did() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    converted = quantized(Network().eval(), CustomQuantizer(), [(x,)])
    coverage = to_program(converted).coverage()
    assert {row.op for row in coverage.rows} >= {"conv2d", "linear", "add", "max_pool2d", "sigmoid"}
    assert "100.0%" in str(coverage)


def test_a_converted_model_runs_on_quantcs_kernels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    batches: Batches = [(torch.randn(4, 16),) for _ in range(3)]
    converted = quantized(model, by_name("x86"), batches)
    program = to_program(converted)
    with torch.no_grad():
        assert torch.equal(program(*batches[0]), converted(*batches[0]))
        assert sqnr(converted(*batches[0]), qc.lower(program, "x86")(*batches[0])) > 35


def test_the_integer_form_agrees_with_the_float_one() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    x = torch.randn(2, 4, 8, 8)
    exported: Any = torch.export.export(model, (x,)).module()
    prepared = prepare_pt2e(exported, by_name("qnnpack"))
    with torch.no_grad():
        prepared(x)
        integer = convert_pt2e(prepared, use_reference_representation=True)
        assert sqnr(convert_pt2e(prepared)(x), integer(x)) > 30
    targets = {str(node.target) for node in integer.graph.nodes}
    assert not [target for target in targets if "quantized_decomposed" in target]
    assert "out_dtype" in targets


def test_a_clamp_goes_with_the_op_before_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    prepared = prepare_pt2e(captured(model, x), by_name("xnnpack"))
    prepared(x)
    program = to_program(convert_pt2e(prepared))
    claims = {op_name(node): claim for node, claim in sorted(program.plan.claims.rows.items(), reverse=True)}
    assert claims["relu"] == claims["linear"]
    assert claims["relu"].root == "relu"
