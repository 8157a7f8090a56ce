"""Comparing a quantized model with the one it came from, node by node."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.flows.pt2e import (
    XNNPACKQuantizer,
    compare_results,
    convert_pt2e,
    extract_results_from_loggers,
    generate_numeric_debug_handle,
    get_symmetric_quantization_config,
    prepare_for_propagation_comparison,
    prepare_pt2e,
)

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def loggers(module: fx.GraphModule, x: Tensor) -> Any:
    watched = prepare_for_propagation_comparison(module)
    with torch.no_grad():
        assert torch.equal(watched(x), module(x))
    return extract_results_from_loggers(watched)


def test_models_are_compared_node_by_node() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    exported = torch.export.export(network, (X,))
    generate_numeric_debug_handle(exported)
    handles = [
        node.meta["custom"]["numeric_debug_handle"] for node in exported.graph.nodes if node.op == "call_function"
    ]
    assert handles == sorted(set(handles))
    reference: Any = exported.module()
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(reference, quantizer)
    with torch.no_grad():
        prepared(X)
    results = compare_results(loggers(reference, X), loggers(convert_pt2e(prepared), X))
    by_name = {info.name: summary for info, summary in results.items()}
    assert {"conv2d", "relu", "conv2d_1"} <= set(by_name)
    for summary in by_name.values():
        assert summary.results[0].sqnr > 25
        assert summary.results[0].mse_loss < 0.01
    assert by_name["conv2d"].ref_module_stack.endswith("0")


def test_the_comparison_agrees_with_torchao() -> None:
    other: Any = import_module("torchao.quantization.pt2e")
    torch.manual_seed(0)
    exported: Any = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(exported.module(), quantizer)
    prepared(x)
    pair = exported.module(), convert_pt2e(prepared)
    ours = compare_results(*(loggers(each, x) for each in pair))
    watched = [other.prepare_for_propagation_comparison(each) for each in pair]
    with torch.no_grad():
        for each in watched:
            each(x)
    results = other.compare_results(*map(other.extract_results_from_loggers, watched))
    found = {info.name: float(summary.results[0].sqnr) for info, summary in ours.items()}
    expected = {info.name: float(summary.results[0].sqnr) for info, summary in results.items()}
    assert found == pytest.approx(expected, rel=1e-4)


def test_handles_are_for_exported_programs() -> None:
    with pytest.raises(ValueError, match="ExportedProgram"):
        generate_numeric_debug_handle(nn.Linear(2, 2))  # type: ignore[arg-type]
