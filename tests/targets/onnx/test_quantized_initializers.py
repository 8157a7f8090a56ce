"""Quantized constants of a model: levels as they are stored, dequantized by ONNX; transposed, folded, in groups, in narrow floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import quantc as qc
from quantc.targets.onnx.dtypes import FLOAT16, FP8_E4M3, INT4, INT8
from quantc.targets.onnx.graph_builder import GraphBuilder
from quantc.targets.onnx.quantized_initializers import QuantizedInitializer, initializer_of
from tests.support.onnx_models import close, initializers, mlp, quantized, seeded

WEIGHT_ONLY = {
    "int8": (qc.INT8_WEIGHT_ONLY, INT8),
    "int4": (qc.INT4_GROUP, INT4),
    "int4-symmetric": (qc.INT4_GROUP_SYMMETRIC, INT4),
    "int2": (qc.INT2_GROUP, INT4),
    "fp16": (qc.FP16_WEIGHT, FLOAT16),
    "fp8": (qc.FP8_E4M3_WEIGHT, FP8_E4M3),
}


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_alone(name: str) -> None:
    spec, kind = WEIGHT_ONLY[name]
    x = seeded(lambda: torch.randn(4, 64))
    made = qc.quantize(seeded(mlp).eval(), (x,), backend="onnx", config=qc.QuantConfig().set_all(spec)).program
    model = qc.lower(made, "onnx")
    assert list(initializers(model).values()).count(kind) >= 2
    assert close(made(x), model(x)) > 100
    blocks = [a.i for node in model.proto.graph.node for a in node.attribute if a.name == "block_size"]
    assert bool(blocks) == ("group" in str(spec.granularity))


def test_four_bits_take_half_a_byte() -> None:
    x = torch.randn(2, 256)
    layer = nn.Linear(256, 256, bias=False).eval()
    sizes = {
        spec: qc.lower(
            qc.quantize(layer, (x,), backend="onnx", config=qc.QuantConfig().set_all(spec)).program, "onnx"
        ).proto.ByteSize()
        for spec in (qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP_SYMMETRIC)
    }
    assert sizes[qc.INT8_WEIGHT_ONLY] < 256 * 256 * 1.1
    assert sizes[qc.INT4_GROUP_SYMMETRIC] < 256 * 256 * (1 / 2 + 1 / 8 + 1 / 32) * 1.1


def run(build: GraphBuilder, output: str) -> Any:
    """The value of a graph without inputs, by onnx's own evaluator."""
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    graph = helper.make_graph(build.nodes, "graph", [], made, build.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (found,) = ReferenceEvaluator(model).run(None, {})
    return found


LEVELS = torch.tensor([[1, -2, 3, 4], [-5, 6, -7, 0]], dtype=torch.int8)
PLAIN = QuantizedInitializer("w", LEVELS, torch.tensor(0.5), torch.tensor(1), kind=INT8)
BY_ROW = QuantizedInitializer("w", LEVELS, torch.tensor([0.5, 2.0]), torch.tensor([1, -1]), 0, kind=INT8)
BY_COLUMN = QuantizedInitializer("w", LEVELS, torch.tensor([1.0, 2.0, 4.0, 8.0]), None, 1, kind=INT8)
GROUPED = QuantizedInitializer(
    "w", LEVELS, torch.tensor([[0.5, 1.0], [2.0, 4.0]]), torch.tensor([[1, 0], [0, -2]]), 1, 2, INT4
)
FLOATS = QuantizedInitializer("w", LEVELS.to(torch.float8_e4m3fn), torch.tensor([0.5, 2.0]), None, 0)
VALUES: dict[str, tuple[QuantizedInitializer, list[list[float]]]] = {
    "whole": (PLAIN, [[0.0, -1.5, 1.0, 1.5], [-3.0, 2.5, -4.0, -0.5]]),
    "by row": (BY_ROW, [[0.0, -1.5, 1.0, 1.5], [-8.0, 14.0, -12.0, 2.0]]),
    "by column": (BY_COLUMN, [[1.0, -4.0, 12.0, 32.0], [-5.0, 12.0, -28.0, 0.0]]),
    "in groups": (GROUPED, [[0.0, -1.5, 3.0, 4.0], [-10.0, 12.0, -20.0, 8.0]]),
    "floats": (FLOATS, [[0.5, -1.0, 1.5, 2.0], [-10.0, 12.0, -14.0, 0.0]]),
    "floats as they are": (replace(FLOATS, scale=None), LEVELS.tolist()),
}
"""Worked out by hand: (level - zero point) * scale."""


@pytest.mark.parametrize("case", VALUES)
def test_written_plain_and_folded_it_is_the_same_value(case: str) -> None:
    weight, wanted = VALUES[case]
    for write in (weight.write, weight.write_folded):
        build = GraphBuilder()
        assert run(build, write(build)).tolist() == wanted


@pytest.mark.parametrize("case", ["whole", "by row", "by column"])
def test_what_is_folded_has_no_dequantize_op(case: str) -> None:
    weight, _ = VALUES[case]
    build = GraphBuilder()
    weight.write_folded(build)
    assert "DequantizeLinear" not in [node.op_type for node in build.nodes]
    assert ("Sub" in [node.op_type for node in build.nodes]) == (weight.zero_point is not None)


@pytest.mark.parametrize("case", ["whole", "by row", "by column", "in groups"])
def test_transposed_it_is_the_transposed_value(case: str) -> None:
    weight, wanted = VALUES[case]
    turned, build = weight.transposed(), GraphBuilder()
    assert run(build, turned.write(build)).tolist() == torch.tensor(wanted).t().tolist()
    assert turned.name == "w_transposed"
    assert torch.equal(turned.transposed().levels, weight.levels)


def test_integer_kernels_multiply_bytes_with_a_scale_for_all_or_for_each_column() -> None:
    assert PLAIN.is_bytes
    assert BY_COLUMN.is_bytes
    assert not BY_ROW.is_bytes
    assert BY_ROW.transposed().is_bytes
    assert not GROUPED.is_bytes
    assert not FLOATS.is_bytes
    assert not replace(PLAIN, kind=INT4).is_bytes


def test_constants_that_a_program_dequantizes_are_found() -> None:
    x = seeded(lambda: torch.randn(4, 64))
    program = quantized(seeded(mlp), [(x,)])
    found = [weight for node in program.graph.nodes if (weight := initializer_of(program, node)) is not None]
    assert [(weight.name, tuple(weight.levels.shape), weight.axis, weight.kind) for weight in found] == [
        ("0.weight_quantized", (32, 64), 0, INT8),
        ("2.weight_quantized", (8, 32), 0, INT8),
    ]
    activations = [node for node in program.graph.nodes if "dequantize_per_tensor" in str(node.target)]
    assert activations
    assert all(initializer_of(program, node) is None for node in activations)
    assert initializer_of(program, None) is None
