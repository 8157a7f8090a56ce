"""What is written in ONNX: types, ranges, shapes, names; and what is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.backends.onnx import ONNX, OPENVINO, TENSORRT
from quantc.errors import MissingDependencyError, ModeError, UnknownNameError
from quantc.qdq.registration import decomposed_ops
from quantc.targets.onnx.dtypes import FLOAT16, FP8_E4M3, INT4, INT8, INT32
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.onnx_module import OnnxModel
from quantc.targets.onnx.op_writers import NoOnnxFormError
from quantc.targets.onnx.profiles import profile_of
from quantc.testing import Check, check_backend
from tests.support.onnx_models import ADDED, close, initializers, ops, quantized, seeded

WEIGHT_ONLY = {
    "int8": (qc.INT8_WEIGHT_ONLY, INT8),
    "int4": (qc.INT4_GROUP, INT4),
    "int4-symmetric": (qc.INT4_GROUP_SYMMETRIC, INT4),
    "int2": (qc.INT2_GROUP, INT4),
    "fp16": (qc.FP16_WEIGHT, FLOAT16),
    "fp8": (qc.FP8_E4M3_WEIGHT, FP8_E4M3),
}


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))


@pytest.fixture(scope="module")
def images() -> list[tuple[Tensor, ...]]:
    return [(seeded(lambda: torch.randn(2, 3, 8, 8), seed),) for seed in range(3)]


@pytest.fixture(scope="module")
def program(images: list[tuple[Tensor, ...]]) -> qc.Program:
    return quantized(seeded(small_cnn), images)


# -- the numbers ---------------------------------------------------------------------------------------------------


def test_the_file_runs_without_quantc(program: qc.Program, images: Any, tmp_path: Path) -> None:
    qc.lower(program, "onnx").save(tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: images[0][0].numpy()})
    assert close(program(*images[0]), torch.from_numpy(found)) > 60


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


@pytest.mark.parametrize("backend", ["executorch", "qnnpack", "x86"])
def test_programs_for_other_backends_are_written_too(backend: str, images: Any) -> None:
    """Those with int8 activations as uint8, shifted by 128."""
    made = quantized(seeded(small_cnn), images, backend)
    model = qc.lower(made, "onnx")
    assert onnx.TensorProto.UINT8 in initializers(model).values()
    assert close(made(*images[1]), model(*images[1])) > 50
    assert (model.fusions().fraction == 1.0) == (backend != "x86")


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


# -- types ---------------------------------------------------------------------------------------------------------


def test_weights_are_bytes_and_biases_int32(program: qc.Program) -> None:
    kinds = initializers(qc.lower(program, "onnx"))
    assert kinds["0.weight_quantized"] == INT8
    assert kinds["6.weight_quantized_transposed"] == INT8
    assert sum(kind == INT32 for kind in kinds.values()) == 2
    floats = initializers(qc.lower(program, "onnx", profile="tensorrt"))
    assert INT32 not in floats.values()


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


def test_rows_of_a_table_are_looked_up_as_bytes() -> None:
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 4))
    words = (torch.randint(0, 100, (2, 5)),)
    made = quantized(model, [words])
    written = qc.lower(made, "onnx")
    gather = next(node for node in written.proto.graph.node if node.op_type == "Gather")
    assert initializers(written)[gather.input[0]] == INT8
    assert close(made(*words), written(*words)) > 100


# -- shapes --------------------------------------------------------------------------------------------------------


def test_sizes_that_vary_still_do() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.inner(x).reshape(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)
            scores = torch.softmax(heads @ heads.transpose(2, 3), -1) @ heads
            return x + torch.as_tensor(self.outer(scores.transpose(1, 2).flatten(2)))

    sizes = {0: Dim("batch", max=64), 1: Dim("length", max=128)}
    x = seeded(lambda: torch.randn(2, 6, 16))
    made = quantized(seeded(Net), [(x,)], dynamic_shapes=(sizes,))
    model = qc.lower(made, "onnx")
    names = [size.dim_param for size in model.proto.graph.input[0].type.tensor_type.shape.dim]
    assert names[0] != names[1]
    assert all(names[:2])
    for shape in ((2, 6, 16), (5, 9, 16), (1, 3, 16)):
        other = torch.randn(shape)
        assert close(made(other), model(other)) > 60
    with pytest.raises(qc.errors.InputError):
        model(torch.randn(2, 6, 17))


# -- claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [ONNX, OPENVINO, TENSORRT], ids=lambda backend: backend.name)
def test_every_rule_claims_onnx(backend: qc.Backend) -> None:
    """tests/testing/test_kit.py holds them to it, in ONNX Runtime."""
    assert {rule.name for rule in backend.table if "onnx" not in rule.supports} == set()


@pytest.mark.parametrize("rule", ["add-convolutions", "matmul-constant"])
def test_some_rules_are_held_to_it_here(rule: str) -> None:
    backend = replace(ONNX, table=ONNX.table.only(rule))
    backend = replace(backend, roles={name: spec for name, spec in ONNX.roles.items() if name in used(rule)})
    found = check_backend(backend, examples=ADDED if rule in ADDED else None).row(rule, Check.ONNX)
    assert found is not None
    assert found.passed, str(found)
    assert found.models > 0


def used(rule: str) -> set[str]:
    return {role.removesuffix("?") for role in ONNX.table[rule].roles.values()}


# -- what it says --------------------------------------------------------------------------------------------------


def test_the_file_says_where_it_comes_from(program: qc.Program, images: Any, tmp_path: Path) -> None:
    model = qc.lower(program, "onnx")
    model.save(tmp_path / "model.onnx")
    facts = {entry.key: entry.value for entry in onnx.load(str(tmp_path / "model.onnx")).metadata_props}
    assert len(facts.pop("quantc.seal")) == 64  # of the file alone
    assert facts == model.metadata
    assert facts["quantc.backend"] == "onnx"
    assert facts["quantc.profile"] == "onnxruntime"
    other = quantized(seeded(small_cnn, 1), images, "onnx", qc.QuantConfig().set("6", qc.FLOAT))
    theirs = qc.lower(other, "onnx").metadata
    assert theirs["quantc.source"] != facts["quantc.source"]
    assert theirs["quantc.config"] != facts["quantc.config"]
    assert qc.lower(program, "onnx").metadata == facts


def test_it_prints_and_copies(program: qc.Program, images: Any) -> None:
    model = qc.lower(program, "onnx")
    assert "3 of 3 quantized ops on integers" in str(model)
    assert model.to_data()["fusions"]["fraction"] == 1.0
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert torch.equal(twin(*images[0]), model.run(*images[0]))
    with pytest.raises(ModeError, match="cannot be trained"):
        model.train()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_every_op_without_a_form_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = torch.digamma(x) + torch.special.i0(self.layer(x))
            return made

    made = quantized(Odd(), [(torch.rand(2, 8) + 1,)])
    with pytest.raises(NoOnnxFormError) as caught:
        qc.lower(made, "onnx")
    text = str(caught.value)
    assert "2 of the ops of Odd have no ONNX form" in text
    assert "aten.special_i0.default" in text
    assert "aten.digamma.default" in text
    assert "test_onnx_export.py" in text


def test_what_is_not_in_qdq_form_is_refused(program: qc.Program, images: Any) -> None:
    captured = qc.capture(seeded(small_cnn).eval(), images[0])
    with pytest.raises(qc.QuantcError, match="is not quantized"):
        qc.lower(captured, "onnx")
    prepared = qc.prepare(captured, "onnx")
    qc.calibrate(prepared, images, progress="silent")
    with pytest.raises(qc.QuantcError, match="is in integer form"):
        qc.lower(qc.convert(prepared, to="integer"), "onnx")
    with pytest.raises(UnknownNameError, match="no profile 'tflite'"):
        qc.lower(program, "onnx", profile="tflite")
    with pytest.raises(UnknownNameError, match="onnx"):
        qc.lower(program, "onx")


def test_without_the_package_the_extra_is_named(program: qc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'quantc\[onnx\]'"):
        qc.lower(program, "onnx")
