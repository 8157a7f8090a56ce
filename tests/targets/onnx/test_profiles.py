"""Runtime profiles: the forms in which a program is written for ONNX Runtime, OpenVINO and TensorRT."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

import quantc as qc
from quantc.errors import UnknownNameError
from quantc.targets.onnx.dtypes import INT8, INT32
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.profiles import PROFILES, profile_of
from tests.support.onnx_models import close, image_batches, initializers, mlp, quantized, seeded, small_cnn
from tests.support.onnx_ops import Function, drawn, program_of


@pytest.fixture(scope="module")
def images() -> list[tuple[Tensor, ...]]:
    return image_batches()


@pytest.fixture(scope="module")
def program(images: list[tuple[Tensor, ...]]) -> qc.Program:
    return quantized(seeded(small_cnn), images)


@pytest.mark.parametrize("backend", ["executorch", "qnnpack", "x86"])
def test_programs_for_other_backends_are_written_too(backend: str, images: Any) -> None:
    """Those with int8 activations as uint8, shifted by 128."""
    made = quantized(seeded(small_cnn), images, backend)
    model = qc.lower(made, "onnx")
    assert onnx.TensorProto.UINT8 in initializers(model).values()
    assert close(made(*images[1]), model(*images[1])) > 50
    assert (model.fusions().fraction == 1.0) == (backend != "x86")


def test_weights_are_bytes_and_biases_int32(program: qc.Program) -> None:
    kinds = initializers(qc.lower(program, "onnx"))
    assert kinds["0.weight_quantized"] == INT8
    assert kinds["6.weight_quantized_transposed"] == INT8
    assert sum(kind == INT32 for kind in kinds.values()) == 2
    floats = initializers(qc.lower(program, "onnx", profile="tensorrt"))
    assert INT32 not in floats.values()


def test_the_profile_is_that_of_the_backend_unless_one_is_named(images: list[tuple[Tensor, ...]]) -> None:
    told = {"onnx": "onnxruntime", "x86": "onnxruntime", "openvino": "openvino", "tensorrt": "tensorrt"}
    captured = qc.capture(seeded(small_cnn).eval(), images[0])
    assert profile_of(captured, None).name == "onnxruntime"
    for backend, name in told.items():
        prepared = qc.prepare(captured, backend)
        assert profile_of(prepared, None) is PROFILES[name]
        assert profile_of(prepared, "tensorrt") is PROFILES["tensorrt"]


def test_an_unknown_profile_is_told_with_the_nearest(program: qc.Program) -> None:
    with pytest.raises(UnknownNameError, match="profile 'onnxrutime'") as caught:
        profile_of(program, "onnxrutime")
    assert "onnxruntime" in str(caught.value.advice)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_the_same_numbers(name: str, program: qc.Program, images: list[tuple[Tensor, ...]]) -> None:
    model = qc.lower(program, "onnx", profile=name)
    assert model.profile == name
    assert close(program(*images[1]), model(*images[1])) > 60


def test_a_sum_before_a_norm_is_written_as_the_runtime_wants_it() -> None:
    x = drawn(3, 8)
    module = Function(lambda x: torch.layer_norm(x + x, (8,)))
    for name, op in (("onnxruntime", "Sum"), ("openvino", "Add"), ("tensorrt", "Add")):
        model = export(program_of(module, x), PROFILES[name]).model
        assert [node.op_type for node in model.graph.node] == [op, "LayerNormalization", "Identity"]


def test_int8_activations_are_shifted_for_those_that_want_uint8() -> None:
    x = seeded(lambda: torch.randn(4, 64))
    made = quantized(seeded(mlp), [(x,)], "tensorrt")
    for name, kind in (("tensorrt", onnx.TensorProto.INT8), ("onnxruntime", onnx.TensorProto.UINT8)):
        written = qc.lower(made, "onnx", profile=name)
        first = next(node for node in written.proto.graph.node if node.op_type == "QuantizeLinear")
        assert initializers(written)[first.input[2]] == kind
        assert close(made(x), written(x)) > 60
