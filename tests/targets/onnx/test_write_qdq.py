"""ONNX writers of quantize, dequantize and scales that are found as the model runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.backends.onnx import ONNX
from quantc.qdq.float_ops import DEQUANTIZE
from quantc.qdq.registration import decomposed_ops
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.onnx_module import OnnxModel
from quantc.targets.onnx.profiles import PROFILES, profile_of
from quantc.targets.onnx.sessions import OnnxRuntime
from quantc.targets.onnx.write_qdq import quantized_bounds
from tests.support import onnx_draws_sizes
from tests.support.onnx_calls import difference
from tests.support.onnx_models import close, image_batches, initializers, mlp, ops, quantized, seeded, small_cnn
from tests.support.onnx_ops import Function, check_function, refusal


@pytest.fixture(scope="module")
def images() -> list[tuple[Tensor, ...]]:
    return image_batches()


@pytest.fixture(scope="module")
def program(images: list[tuple[Tensor, ...]]) -> qc.Program:
    return quantized(seeded(small_cnn), images)


@pytest.mark.parametrize("name", onnx_draws_sizes.RUN_TIME)
def test_scales_found_at_run_time(name: str) -> None:
    module = Function(onnx_draws_sizes.RUN_TIME[name]).eval()
    x = torch.randn(6, 4)
    program = qc.capture(module, (x,))
    exported = export(program, PROFILES["onnxruntime"])
    session = OnnxRuntime(exported.model.SerializeToString(), 1)
    for size in (1.0, 1e-3, 100.0):
        for numbers in (x * size, x.abs() * size, -x.abs() * size, x * 0):
            step = float(numbers.abs().max()) / 100 + 1e-5
            assert difference(module(numbers), session([numbers])[0], step) is None


@settings(max_examples=40)
@given(
    scale=st.floats(1e-3, 2.0),
    ends=st.sampled_from([(0, 127), (0, 255), (3, 250), (0, 1)]),
    data=st.data(),
)
@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt"])
def test_ranges_hold_at_and_beyond_their_ends(
    profile: str, scale: float, ends: tuple[int, int], data: st.DataObject
) -> None:
    zero_point = data.draw(st.integers(*ends))
    scale = float(np.float32(scale))
    x = torch.cat([(torch.arange(-20, 280).float() - zero_point) * scale, torch.tensor([-1e6, 1e6, 0.0])])
    arguments = (scale, zero_point, *ends, torch.uint8)
    program = one_quantizer(x, *arguments)
    found = OnnxModel(program, export(program, profile_of(program, profile)))(x)
    wanted = decomposed_ops().quantize_per_tensor(x, *arguments).float()
    levels = found / scale + zero_point
    assert levels.round().min() >= ends[0]
    assert levels.round().max() <= ends[1]
    assert torch.equal(levels.round(), wanted)


def one_quantizer(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> qc.Program:
    """A program that rounds its input onto a grid, and does nothing else."""
    decomposed = decomposed_ops()

    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            levels = decomposed.quantize_per_tensor.default(x, scale, zero_point, qmin, qmax, dtype)
            found: Tensor = decomposed.dequantize_per_tensor.default(levels, scale, zero_point, qmin, qmax, dtype)
            return found

    program = qc.capture(torch.export.export(Rounded(), (x,)))
    program.stage = qc.Stage.FOLDED
    return program


@pytest.mark.parametrize("backend", ["onnx", "tensorrt"])
def test_a_narrow_range_of_activations_is_kept_in_a_model(backend: str) -> None:
    x = seeded(lambda: torch.randn(4, 64))
    narrow = qc.UINT8.but(qmax=127) if backend == "onnx" else qc.INT8.but(scheme="symmetric", qmin=-63, qmax=63)
    config = qc.QuantConfig().set_all(narrow)
    program = quantized(seeded(mlp), [(x,)], backend, config)
    far = 20 * x
    model = qc.lower(program, "onnx")
    assert close(program(far), model(far)) > 60


def test_clips_are_dropped_where_the_grid_ends_there(program: qc.Program) -> None:
    assert "Clip" not in ops(qc.lower(program, "onnx"))
    assert "Clip" in ops(qc.lower(program, "onnx", profile="tensorrt"))


def test_a_clip_within_the_grid_stays() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Hardtanh(-0.1, 0.1), nn.Linear(32, 8))
    x = (seeded(lambda: torch.randn(4, 64)),)
    made = quantized(model, [x], ONNX.but(act=qc.UINT8.but(eps=0.01)))  # steps so wide that the ends are within
    written = qc.lower(made, "onnx")
    assert "Clip" in ops(written)
    assert close(made(*x), written(*x)) > 60


def test_int16_activations() -> None:
    x = (seeded(lambda: torch.randn(4, 64)),)
    made = quantized(seeded(mlp), [x], "onnx", qc.QuantConfig().set_all(qc.INT16))
    model = qc.lower(made, "onnx")
    assert onnx.TensorProto.INT16 in initializers(model).values()
    assert close(made(*x), model(*x)) > 60


def test_scales_that_are_found_as_the_model_runs() -> None:
    x = seeded(lambda: torch.randn(4, 64))
    made = qc.quantize(seeded(mlp).eval(), (x,), backend="onnx", mode="dynamic").program
    model = qc.lower(made, "onnx")
    assert ops(model).count("DynamicQuantizeLinear") == ops(model).count("MatMulInteger") == 2
    assert sum(model.fusions().integer.values()) == 2
    assert close(made(5 * x), model(5 * x)) > 60


@pytest.mark.parametrize(
    "spec", [qc.INT8_TOKEN, qc.UINT8_TOKEN, qc.INT8_DYNAMIC, qc.UINT8_DYNAMIC.but(qmax=127)], ids=str
)
@pytest.mark.parametrize("profile", ["onnxruntime", "openvino"])
def test_other_scales_that_are_found_as_the_model_runs(spec: qc.QuantSpec, profile: str) -> None:
    x = seeded(lambda: torch.randn(4, 64))
    config = qc.QuantConfig().set_all(spec)
    made = qc.quantize(seeded(mlp).eval(), (x,), backend="x86", mode="dynamic", config=config).program
    model = qc.lower(made, "onnx", profile=profile)
    assert close(made(x), model(x)) > 60
    assert torch.isfinite(model(torch.zeros(4, 64))).all()


def test_bounds_of_a_clamp_are_those_of_the_levels() -> None:
    """A grid of steps of 0.5 around level 10, with the levels 0..255."""
    assert quantized_bounds((None, None), 0.5, 10, (0, 255)) == (0, 255)
    assert quantized_bounds((0.0, None), 0.5, 10, (0, 255)) == (10, 255)
    assert quantized_bounds((-1.0, 6.0), 0.5, 10, (0, 255)) == (8, 22)
    assert quantized_bounds((-100.0, 1000.0), 0.5, 10, (3, 250)) == (3, 250)
    assert quantized_bounds((0.25, 0.75), 0.5, 10, (0, 255)) == (10, 12), "ties go to the even level"


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scale_for_each_channel(axis: int) -> None:
    x = torch.linspace(-4, 4, 24).reshape(4, 6)
    count = x.shape[axis]
    scale, zero_point = torch.linspace(0.01, 0.1, count), torch.arange(count) - 2
    decomposed = decomposed_ops()

    def rounded(x: Tensor) -> Any:
        grid = (scale, zero_point, axis, -100, 100, torch.int8)
        return decomposed.dequantize_per_channel(decomposed.quantize_per_channel(x, *grid), *grid)

    check_function(rounded, x)


def test_int8_without_an_offset_has_no_zero_point_and_others_have_one() -> None:
    """ONNX Runtime 1.31 does not load some models with one of zero that is written out."""
    for dtype, zero_point, inputs in ((torch.int8, 0, 2), (torch.int8, 5, 3), (torch.uint8, 0, 3)):
        ends = (-128, 127) if dtype is torch.int8 else (0, 255)
        program = one_quantizer(torch.randn(4), 0.1, zero_point, *ends, dtype)
        model = export(program, PROFILES["tensorrt"]).model
        (found,) = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
        assert len(found.input) == inputs


def test_a_narrow_float_that_is_no_constant_is_refused() -> None:
    told = refusal(lambda x: DEQUANTIZE(x.to(torch.float8_e4m3fn), torch.tensor(0.5), None), torch.randn(4))
    assert "only constants are stored in narrower floats" in told
