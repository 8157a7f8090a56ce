"""What ONNX Runtime makes of a model, read from the one that it optimized: kernels on integers, and ops left in float."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnx import helper
from torch import Tensor

import quantc as qc
from quantc.targets.onnx.ort_fusions import Fusions, fusions_of
from quantc.targets.onnx.sessions import OnnxRuntime
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


def optimized(*nodes: tuple[str, str, str]) -> Any:
    """A graph as ONNX Runtime has optimized it: ops with what they read and yield."""
    made = [helper.make_node(op, given.split(), result.split()) for op, given, result in nodes]
    return SimpleNamespace(graph=helper.make_graph(made, "graph", [], []))


def test_ops_that_read_dequantized_values_are_found_behind_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = optimized(
        ("DequantizeLinear", "levels scale zero", "x"),
        ("Transpose", "x", "turned"),
        ("Split", "turned", "first second"),
        ("MatMul", "w second", "product"),
        ("Add", "product b", "sum"),
        ("Relu", "first", "y"),
        ("MatMul", "y w", "float"),
        ("QLinearConv", "levels", "z"),
        ("QLinearConv", "z", "last"),
    )
    monkeypatch.setattr(OnnxRuntime, "optimized", lambda content: graph if content == b"model" else None)
    found = fusions_of(SimpleNamespace(SerializeToString=lambda: b"model"))
    assert found == Fusions({"QLinearConv": 2}, {"MatMul": 1}), "what reads a product or an activation is float anyway"
