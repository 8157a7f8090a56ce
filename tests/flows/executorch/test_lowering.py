"""From a converted model to an ExecuTorch program: edge dialect, partitions, program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.flows.executorch import (
    XNNPACKQuantizer,
    convert_pt2e,
    export,
    get_symmetric_quantization_config,
    prepare_pt2e,
    to_executorch,
)

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def converted() -> Any:
    torch.manual_seed(0)
    graph = export.capture_pre_autograd_graph(nn.Sequential(nn.Linear(6, 3), nn.ReLU()).eval(), (X,))
    prepared = prepare_pt2e(graph, XNNPACKQuantizer().set_global(get_symmetric_quantization_config()))
    prepared(X)
    return convert_pt2e(prepared)


def run(program: Any) -> torch.Tensor:
    runtime = pytest.importorskip("executorch.runtime").Runtime.get()
    method = runtime.load_program(program.buffer).load_method("forward")
    (made,) = method.execute([X])
    found: torch.Tensor = made
    return found


def test_the_program_runs_in_the_delegate_and_gives_what_the_model_gives() -> None:
    model = converted()
    program = to_executorch(model, (X,))
    expected = model(X)
    step = float(next(node.args[1] for node in reversed(model.graph.nodes) if "dequantize_per" in str(node.target)))
    assert float((run(program) - expected).abs().max()) <= 1.01 * step
    assert b"XnnpackBackend" in program.buffer


def test_without_partitioners_everything_stays_with_the_portable_kernels() -> None:
    pytest.importorskip("executorch.kernels.quantized")
    model = converted()
    program = to_executorch(model, (X,), [])
    assert b"XnnpackBackend" not in program.buffer
    assert b"quantized_decomposed" in program.buffer


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="to_executorch was given a Linear"):
        to_executorch(nn.Linear(6, 3), (X,))  # type: ignore[arg-type]
