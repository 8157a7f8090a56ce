"""What ONNX Runtime makes of a model, read from the one that it optimized: kernels on integers, and ops left in float."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quantc as qc
from quantc.qdq.registration import decomposed_ops
from quantc.targets.onnx.ort_fusions import Fusions, fusions_of
from tests.support.onnx_models import image_batches, quantized, seeded, small_cnn
from tests.support.onnx_ops import drawn, exported


@pytest.fixture(scope="module")
def images() -> list[tuple[Tensor, ...]]:
    return image_batches()


@pytest.fixture(scope="module")
def program(images: list[tuple[Tensor, ...]]) -> qc.Program:
    return quantized(seeded(small_cnn), images)


def test_the_runtime_fuses_all_of_it(program: qc.Program) -> None:
    found = qc.lower(program, "onnx").fusions()
    assert found.integer == {"QLinearConv": 1, "QLinearGlobalAveragePool": 1, "QGemm": 1}
    assert found.left == {}
    assert found.fraction == 1.0


def test_a_model_that_is_left_in_float_is_said() -> None:
    x = (seeded(lambda: torch.randn(2, 3, 8, 8)),)
    found = qc.lower(quantized(seeded(small_cnn), [x], "x86"), "onnx").fusions()  # a convolution that yields float
    assert found.left
    assert found.fraction < 1
    assert "in float after dequantizing" in str(found)


def test_counts_are_told_by_name() -> None:
    found = Fusions({"QGemm": 2, "QLinearConv": 1}, {"MatMul": 1})
    assert found.fraction == 0.75
    assert str(found).splitlines() == [
        "ONNX Runtime computes 3 of 4 quantized ops on integers: QGemm × 2, QLinearConv × 1",
        "in float after dequantizing: MatMul × 1",
    ]
    assert found.to_data() == {"integer": {"QGemm": 2, "QLinearConv": 1}, "float": {"MatMul": 1}, "fraction": 0.75}


def test_a_model_without_quantized_ops_lacks_nothing() -> None:
    found = fusions_of(exported(lambda x: torch.relu(x @ x), drawn(4, 4)).model)
    assert found == Fusions({}, {})
    assert found.fraction == 1.0
    assert str(found).endswith("on integers: none")


def test_ops_that_read_dequantized_values_are_found_behind_moves() -> None:
    """A product in float of levels that were dequantized, transposed and reshaped before it."""
    decomposed = decomposed_ops()
    grid = (0.1, 3, 0, 255, torch.uint8)

    def product(levels: Tensor) -> Tensor:
        x: Tensor = decomposed.dequantize_per_tensor(levels, *grid)
        return torch.sin(x).t() @ x.t().reshape(4, 2, 2).flatten(1)

    found = fusions_of(exported(product, torch.arange(16, dtype=torch.uint8).reshape(4, 4)).model)
    assert found.integer == {}
    assert sum(found.left.values()) == 1
    assert set(found.left) <= {"MatMul", "FusedMatMul", "Gemm"}
