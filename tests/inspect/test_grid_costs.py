"""What ops cost: found by leaving their grids out, and counted for the op that makes the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.inspect.comparison import Comparison


class Bad(nn.Module):
    """One tensor with a number that is far larger than the others, between two innocent linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.norm.weight.data[3] = 200.0
        self.b.weight.data[:, 3] *= 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.norm(self.a(x)))))  # type: ignore[no-any-return]


def compared(model: nn.Module, backend: str, form: str = "qdq") -> Comparison:
    torch.manual_seed(1)
    batches = [torch.randn(64, 16) for _ in range(4)]
    result = qc.quantize(model.eval(), (batches[0],), batches, backend, to=form)  # type: ignore[arg-type]
    assert result.report.comparison is not None
    assert "costs, dB" in str(result.report)
    return result.report.comparison


@pytest.mark.parametrize("backend", ["qnnpack", "x86", "executorch"])
def test_the_op_that_makes_a_bad_tensor_is_blamed_and_not_its_reader(backend: str) -> None:
    torch.manual_seed(0)
    found = compared(Bad(), backend)
    blamed = found.costliest(1)[0]
    assert blamed.op == "layer_norm"
    assert blamed.gain is not None
    assert blamed.gain > 3
    assert found.worst(1)[0].op == "linear"  # which only reads what the norm yields
    assert blamed.readers == (
        () if backend == "qnnpack" else ("linear_1",)
    )  # float elsewhere, and rounded for its reader
    measured = [layer.gain for layer in found.costliest() if layer.gain is not None]
    assert measured == sorted(measured, reverse=True)


def test_a_cost_is_what_leaving_the_op_float_gains() -> None:
    """In a chain whose last op alone yields a grid that nobody else asks for."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Last().eval()
    batches = [torch.randn(64, 16) for _ in range(2)]
    program = qc.prepare(qc.capture(model, (batches[0],)), "x86")
    qc.calibrate(program, batches)
    found = qc.compare(program, qc.convert(program), batches[:1])
    (row,) = found.costliest()
    assert row.gain == float("inf")  # nothing else is quantized
    assert row.to_data()["gain"] == "inf"


def test_nothing_is_measured_where_the_plan_does_not_say_all() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 16) for _ in range(2)]
    dynamic = qc.quantize(Bad().eval(), (batches[0],), None, "x86", mode="dynamic").report.comparison
    assert dynamic is not None
    assert all(layer.gain is None for layer in dynamic.layers)
    assert dynamic.costliest() == dynamic.worst()
    program = qc.prepare(qc.capture(Bad().eval(), (batches[0],)), "x86")
    qc.calibrate(program, batches)
    other = qc.compare(qc.capture(Bad().eval(), (batches[0],)), qc.convert(program), batches)
    assert all(layer.gain is None for layer in other.layers)
