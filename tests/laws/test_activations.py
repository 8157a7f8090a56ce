"""Each activation of the dialect, everywhere: what its row says is enough for every target and every flow.

The reference of its integers is NumPy's rounding of torch's own function in float64; ONNX models run in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.flows.fx import convert_fx, get_default_qconfig_mapping, prepare_fx
from quantc.flows.tracing import convert, prepare
from quantc.integer.library import OPS
from quantc.ir.dialect import ops_in
from quantc.ir.op_row import Family
from quantc.qdq.ops import is_quantize
from quantc.targets.kernels.kernel_agreement import kernel_agreement

BOUNDS = ("relu", "clamp")
"""No tables: they are bounds of what they follow."""
NAMES = ops_in(Family.ACTIVATION, but=BOUNDS)
BATCHES = [torch.randn(16, 12, generator=torch.Generator().manual_seed(n)) * 2 for n in range(4)]


@cache
def function(name: str) -> Callable[[Tensor], Tensor]:
    """Torch's own function, with the options it has by default."""
    found: Any = getattr(F, name, None) or getattr(torch, name, None) or getattr(torch.ops.aten, name)
    return found  # type: ignore[no-any-return]


class Alone(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = function(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Between(Alone):
    """Between two layers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))  # type: ignore[no-any-return]


def calibrated(model: nn.Module, backend: str) -> qc.Program:
    prepared = qc.prepare(qc.capture(model.eval(), (BATCHES[0],)), backend)
    qc.calibrate(prepared, BATCHES, progress="silent")
    return prepared


def assert_close(expected: Sequence[Tensor], given: Sequence[Tensor], decibels: float) -> None:
    error = torch.cat([one - other for one, other in zip(expected, given, strict=True)]).norm()
    assert float(20 * torch.log10(torch.cat([*expected]).norm() / error)) >= decibels


@pytest.mark.parametrize("name", NAMES)
def test_the_integer_form_is_a_table_of_torchs_own_numbers(name: str) -> None:
    prepared = calibrated(Alone(name), "qnnpack")
    program, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    (x_scale, x_zero), (scale, zero) = (node.args[1:3] for node in program.graph.nodes if is_quantize(node))
    (lookup,) = [node for node in lowered.graph.nodes if node.target is OPS["lookup"].target]
    table = lowered.tensor(lookup.args[1])
    assert table is not None
    reals = (np.arange(256, dtype=np.float64) - float(x_zero)) * float(np.float32(x_scale))
    steps = function(name)(torch.from_numpy(reals)).numpy() / float(np.float32(scale))
    expected = np.clip(np.rint(steps) + float(zero), 0, 255)
    off = table.double().numpy() != expected
    assert np.abs(np.abs(steps - np.floor(steps)) - 0.5)[off].sum() < 1e-9, "but for ties nothing differs"
    assert off.sum() <= 1


@pytest.mark.filterwarnings("ignore:sums can saturate")
@pytest.mark.parametrize("target", ["x86", "qnnpack"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_within_a_step_of_the_integer_form(name: str, target: str) -> None:
    program = qc.convert(calibrated(Between(name), target), reduce_range="weights")
    lowered = qc.lower(program, target)
    gaps = kernel_agreement(lowered, BATCHES[1])
    assert all(gap.steps <= 1 and gap.relative <= 2e-6 for gap in gaps), "\n".join(map(str, gaps))
    calls = {str(node.target) for node in lowered.module.graph.nodes if node.op == "call_function"}
    assert not any(f"aten.{name}." in call for call in calls), "no activation is left float"


@pytest.mark.parametrize("name", NAMES)
def test_onnx_runtime_computes_the_same(name: str) -> None:
    program = qc.convert(calibrated(Between(name), "onnx"))
    lowered = qc.lower(program, "onnx")
    assert_close([program(x) for x in BATCHES], [lowered(x) for x in BATCHES], 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_delegate_of_executorch_takes_the_layers(name: str) -> None:
    pytest.importorskip("executorch")
    program = qc.convert(calibrated(Between(name), "executorch"))
    lowered = qc.lower(program, "executorch")
    assert_close([program(x) for x in BATCHES], [lowered(x) for x in BATCHES], 25)


@pytest.mark.parametrize("name", NAMES)
def test_the_tracing_flow_and_fx_run_it(name: str) -> None:
    model = Between(name).eval()
    expected = [model(x).detach() for x in BATCHES]
    traced = prepare(model, BATCHES[0])
    with torch.no_grad():
        for x in BATCHES:
            traced(x)
        assert_close(expected, [convert(traced)(x) for x in BATCHES], 25)
        graph = prepare_fx(model, get_default_qconfig_mapping("qnnpack"), (BATCHES[0],))
        for x in BATCHES:
            graph(x)
        assert_close(expected, [convert_fx(graph)(x) for x in BATCHES], 25)
