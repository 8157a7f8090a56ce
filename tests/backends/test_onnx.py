"""Q/DQ for ONNX runtimes: convolutions yield bytes, products of matrices float; TensorRT is symmetric."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import quantizer_of
from quantc.backends.onnx import ONNX, OPENVINO, TENSORRT
from quantc.errors import AnnotationError
from quantc.spec.formats import Offer, Scheme
from quantc.spec.spec import INT8, INT8_WEIGHT, INT16, UINT8, UINT8_DYNAMIC
from tests.support.backend_cases import captured, decided, image


def convs() -> dict[str, nn.Module]:
    return {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1)}


@pytest.mark.parametrize("activation", [F.hardswish, F.mish, F.gelu])
def test_a_sum_with_a_convolution_yields_bytes_whatever_activation_lies_between(activation: Any) -> None:
    def run(self: Any, x: Tensor) -> Any:
        return activation(self.a(x)) + x

    rules, sites = decided(captured(run, image(), **convs()), "onnx")
    assert rules["add"] == "add-convolutions"
    assert {"add:in0", "add:in1", "add:out0"} <= sites


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: x.exp() + self.a(x).exp(), "add adds nothing that a convolution yields"),
        (lambda self, x: self.a(x) + x.mean((2, 3), keepdim=True), "mean is f32[batch,4,1,1]"),
        (lambda self, x: x + self.a(x.mean((2, 3), keepdim=True)), "conv2d is f32[batch,4,1,1]"),
    ],
    ids=["exp lies between", "the other side is broadcast", "the convolution is broadcast"],
)
def test_other_sums_are_not_made_bytes(forward: Any, reason: str) -> None:
    prepared = qc.prepare(captured(forward, image(), **convs()), "onnx")
    claim = prepared.plan.claims.get(prepared.node("add"))
    assert claim is None or claim.rule == "add"
    assert reason in str(quantizer_of("onnx").explain(prepared, "add"))


def test_products_of_matrices_yield_float_and_the_residual_sum_stays_so() -> None:
    program = captured(lambda self, x: x + self.a(x), torch.randn(2, 8), a=nn.Linear(8, 8))
    rules, sites = decided(program, "onnx")
    assert rules == {"linear": "linear"}
    assert sites == {"linear:in0", "linear:in1"}


def test_transposed_convolutions_are_left_to_float() -> None:
    program = captured(
        lambda self, x: self.up(self.a(x)), image(), a=nn.Conv2d(4, 4, 1), up=nn.ConvTranspose2d(4, 4, 1)
    )
    assert set(decided(program, "onnx")[0]) == {"conv2d"}


def test_openvino_is_onnx_under_its_own_name() -> None:
    assert (OPENVINO.name, OPENVINO.table, OPENVINO.roles) == ("openvino", ONNX.table, ONNX.roles)
    assert OPENVINO.summary != ONNX.summary


@pytest.mark.parametrize(
    ("spec", "onnx", "tensorrt"),
    [
        (UINT8, True, False),
        (INT8, True, False),
        (INT8.but(scheme="symmetric"), True, True),
        (INT16, True, False),
        (UINT8_DYNAMIC, True, False),
        (INT8_WEIGHT, True, True),
        (INT8_WEIGHT.but(scheme="affine"), True, False),
    ],
    ids=str,
)
def test_what_tensorrt_takes_is_int8_symmetric_and_fixed(spec: qc.QuantSpec, onnx: bool, tensorrt: bool) -> None:
    assert (ONNX.why_not(spec) is None) is onnx
    assert (TENSORRT.why_not(spec) is None) is tensorrt


def test_tensorrt_offers_nothing_at_run_time() -> None:
    assert {rule.dynamic for rule in TENSORRT.table} == {Offer.NO}
    assert Offer.YES in {rule.dynamic for rule in ONNX.table}
    assert set(TENSORRT.modes) == {"weight-only"}
    assert TENSORRT.outcome("act").spec.scheme is Scheme.SYMMETRIC
    program = captured(lambda self, x: self.a(x), torch.randn(2, 8), a=nn.Linear(8, 8))
    with pytest.raises(AnnotationError, match="dynamic"):
        qc.prepare(program, "tensorrt", config=qc.QuantConfig().set("a", INT8.but(timing="dynamic")))


def test_converting_ends_with_biases_on_the_grid_of_the_sums() -> None:
    program = captured(lambda self, x: self.a(x), image(), a=nn.Conv2d(4, 4, 1))
    prepared = qc.prepare(program, "onnx")
    qc.calibrate(prepared, [image()])
    converted = qc.convert(prepared)
    conv = next(node for node in converted.nodes() if "conv2d" in str(node.target))
    x, w, bias = conv.all_input_nodes
    weight_scale, found = converted.tensor(w.all_input_nodes[1]), converted.tensor(bias)
    assert weight_scale is not None
    assert found is not None
    steps = found.double() / (cast(float, x.args[1]) * weight_scale.double())
    assert torch.allclose(steps, steps.round(), rtol=0, atol=1e-3)
