"""ONNX writers of convolutions, linear layers, matmuls, attention and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.targets.onnx.dtypes import INT8, INT32
from tests.support.onnx_models import close, initializers, ops, quantized, seeded
from tests.support.onnx_ops import (
    Cases,
    check,
    check_case,
    check_function,
    drawn,
    op_types,
    program_of,
    refusal,
)

X, Y, Z = (4, 6), (4, 3, 8, 8), (4, 5, 6)
"""Shapes: a matrix, images, sequences. The first size varies."""
CASES: Cases = {
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), Z),
    "attention-mask": (
        lambda x: (
            F.scaled_dot_product_attention(x, x, x, torch.ones(5, 5).tril().bool())
            + F.scaled_dot_product_attention(x, x, x, torch.arange(25.0).reshape(5, 5))
        ),
        Z,
    ),
    "einsum": (lambda x: torch.einsum("bij, bkj -> bik", x, x), Z),
    "addmm": (lambda x: torch.addmm(torch.ones(6), x, torch.ones(6, 6), alpha=2, beta=3), X),
    "baddbmm": (lambda x: torch.baddbmm(torch.ones(1, 5, 5), x, x.mT), Z),
}
FIXED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "attention-of-nothing": (
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5).bool()),
        torch.randn(2, 5, 4),
    ),
    "bilinear": (
        lambda x: F.bilinear(x, x + 1, torch.arange(32.0).reshape(2, 4, 4) / 32, torch.tensor([1.0, 2.0])),
        torch.randn(3, 4),
    ),
    "one-output": (lambda x: F.linear(x, torch.arange(4.0)), torch.randn(3, 4)),
    "vectors": (lambda x: torch.mv(x, x[0]) + torch.dot(x[0], x[1]), torch.randn(3, 4)),
    "weights-that-are-computed": (lambda x: F.linear(x, x * 2), torch.randn(3, 4)),
    "attention-scale": (lambda x: F.scaled_dot_product_attention(x, x, x, scale=0.3), torch.randn(2, 5, 4)),
    "attention-of-some": (
        lambda x: F.scaled_dot_product_attention(
            x, x, x, torch.tensor([[True, False, True], [False, False, False]])[:, :, None].expand(2, 3, 3)
        ),
        torch.randn(2, 3, 4),
    ),
    "grouped-heads": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], enable_gqa=True),
        torch.randn(1, 4, 3, 8),
    ),
    "table": (lambda x: F.embedding(x, torch.arange(12.0).reshape(4, 3)), torch.tensor([[0, 3], [1, 1]])),
}
"""For the size they were captured with."""


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_what_torch_has(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("name", FIXED)
def test_a_corner_is_what_torch_has(name: str) -> None:
    function, x = FIXED[name]
    check_function(function, x)


def test_rows_of_a_table_are_looked_up_as_bytes() -> None:
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 4))
    words = (torch.randint(0, 100, (2, 5)),)
    made = quantized(model, [words])
    written = qc.lower(made, "onnx")
    gather = next(node for node in written.proto.graph.node if node.op_type == "Gather")
    assert initializers(written)[gather.input[0]] == INT8
    assert close(made(*words), written(*words)) > 100


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.Conv2d(3, 4, 3), (2, 3, 6, 5)),
    "strided, padded, spread, grouped": (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (2, 1), 2, False), (2, 4, 9, 6)),
    "one image": (nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "sequences": (nn.Conv1d(3, 4, 3, 2), (2, 3, 9)),
    "volumes": (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 3, 4, 3)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, dilation=2), (2, 4, 5, 4)),
    "transposed sequence": (nn.ConvTranspose1d(3, 4, 3, 2, bias=False), (3, 6)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_that_of_torch(name: str) -> None:
    layer, shape = CONVOLUTIONS[name]
    check(layer.eval(), program_of(layer, drawn(*shape)), drawn(*shape))


def test_biases_of_quantized_products_are_int32_on_the_grid_of_the_sums() -> None:
    layer, x = seeded(lambda: nn.Linear(8, 4)), drawn(3, 8)
    made = quantized(layer, [(x,)])
    model = qc.lower(made, "onnx")
    (name,) = [name for name, kind in initializers(model).items() if kind == INT32]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.proto.graph.initializer}
    steps = next(constants[node.input[1]] for node in model.proto.graph.node if node.input[0] == name)
    bias = layer.bias.detach()
    assert steps.shape == (4,)
    assert (torch.from_numpy(constants[name] * steps) - bias).abs().max() <= steps.max() / 2 + 1e-9
    assert close(made(x), model(x)) > 60


def test_a_bias_beyond_int32_stays_float() -> None:
    layer = seeded(lambda: nn.Linear(8, 4))
    with torch.no_grad():
        layer.bias.fill_(1e9)
    model = qc.lower(quantized(layer, [(drawn(3, 8),)]), "onnx")
    assert INT32 not in initializers(model).values()


def test_a_batch_of_sequences_of_any_number_is_one_matrix() -> None:
    """So the bias is part of the product, which ONNX Runtime then computes on integers."""
    layer, x = seeded(lambda: nn.Linear(8, 4)), drawn(3, 5, 8)
    made = quantized(layer, [(x,)], dynamic_shapes=({0: Dim("batch", min=1, max=9)},))
    model = qc.lower(made, "onnx")
    assert "Gemm" in ops(model)
    assert "MatMul" not in ops(model)
    for count in (1, 7):
        more = drawn(count, 5, 8, seed=2)
        assert close(made(more), model(more)) > 60


def test_products_with_run_time_scales_are_of_integers_where_the_runtime_wants_them() -> None:
    layer, x = seeded(lambda: nn.Linear(8, 4)), drawn(3, 8)
    made = qc.quantize(layer.eval(), (x,), backend="onnx", mode="dynamic").program
    for profile, op in (("onnxruntime", "MatMulInteger"), ("openvino", "Gemm")):
        model = qc.lower(made, "onnx", profile=profile)
        assert ops(model).count(op) == 1
        assert close(made(x), model(x)) > 60


def test_a_mask_that_leaves_each_query_something_costs_nothing() -> None:
    x = drawn(2, 3, 4)
    mask = torch.ones(3, 3).tril().bool()
    none = torch.zeros(3, 3).bool()
    attend = F.scaled_dot_product_attention
    with_rows = op_types(lambda x: attend(x, x, x, none), x)
    assert op_types(lambda x: attend(x, x, x, mask), x) == [
        op for op in with_rows[:-1] if op not in ("Cast", "ReduceMax", "Equal")
    ]
    assert with_rows[-1] == "Where"


def test_dropout_inside_attention_is_refused() -> None:
    told = refusal(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), drawn(2, 3, 4))
    assert "drops values" in told
