"""The quantizer that the PT2 export flow began with: QNNPACK's table, with int8 activations."""

from __future__ import annotations

import torch
from torch import nn

import quantc as qc
from quantc.flows.pt2e.qnnpack_quantizer import QNNPackQuantizer, get_symmetric_quantization_config
from quantc.flows.pt2e.reference import to_program
from tests.support.pt2e_quantizers import converted, count

X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid()).eval()


def quantizer() -> QNNPackQuantizer:
    return QNNPackQuantizer().set_global(get_symmetric_quantization_config())


def test_activations_are_int8_and_the_result_is_near() -> None:
    model = layers()
    made = converted(model, X, quantizer())
    dtypes = {
        argument
        for node in made.graph.nodes
        for argument in node.args
        if isinstance(argument, torch.dtype) and "quantize_per_tensor" in str(node.target)
    }
    assert dtypes == {torch.int8}
    assert count(made, "dequantize_per_tensor.default") >= 5
    assert float((made(*X) - model(*X)).detach().abs().max()) < 0.05


def test_kernels_that_compute_on_uint8_give_the_same() -> None:
    made = converted(layers(), X, quantizer())
    lowered = qc.lower(to_program(made), "qnnpack")
    assert any(row.kernel for row in lowered.placed)
    assert float((lowered(*X) - made(*X)).abs().max()) <= 1.01 / 256


def test_a_range_that_is_known_is_that_of_int8() -> None:
    made = converted(layers(), X, quantizer())
    (sigmoid,) = (node for node in made.graph.nodes if node.target is torch.ops.aten.sigmoid.default)
    (written,) = sigmoid.users
    assert written.args[1:6] == (1 / 256, -128, -128, 127, torch.int8)


def test_every_config_is_known_for_every_operator() -> None:
    rows = QNNPackQuantizer.get_supported_operators()
    assert {row.config for row in rows} == set(QNNPackQuantizer.known_configs())
