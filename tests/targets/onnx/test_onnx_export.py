"""What is written in ONNX: types, ranges, shapes, names; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.backends.onnx import ONNX, OPENVINO, TENSORRT
from quantc.errors import MissingDependencyError, UnknownNameError
from quantc.targets.onnx.op_writers import NoOnnxFormError
from quantc.testing import Check, check_backend
from tests.support.onnx_models import ADDED, close, image_batches, quantized, seeded, small_cnn


@pytest.fixture(scope="module")
def images() -> list[tuple[Tensor, ...]]:
    return image_batches()


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


# -- types ---------------------------------------------------------------------------------------------------------


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
    """tests/testing/test_backend_checks.py holds them to it, in ONNX Runtime."""
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
    with pytest.raises(UnknownNameError, match="unknown profile 'tflite'"):
        qc.lower(program, "onnx", profile="tflite")
    with pytest.raises(UnknownNameError, match="onnx"):
        qc.lower(program, "onx")


def test_without_the_package_the_extra_is_named(program: qc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'quantc\[onnx\]'"):
        qc.lower(program, "onnx")
