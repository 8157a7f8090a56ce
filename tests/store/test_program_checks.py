"""What a file cannot hold is refused before anything is written: the node is named, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import SaveError
from quantc.ir.program import Program
from quantc.ir.types import type_of_value
from tests.support.store_files import images, small_model


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class WithLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubled()

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.inner(x))


def refused(program: Program, tmp_path: Path) -> SaveError:
    with pytest.raises(SaveError) as caught:
        program.save(tmp_path / "model.qc")
    assert list(tmp_path.iterdir()) == []
    assert caught.value.where
    assert caught.value.advice
    return caught.value


def test_a_module_kept_whole_is_refused_by_name(tmp_path: Path) -> None:
    program = qc.capture(WithLeaf(), (images(),), method="fx", leaf=Doubled)
    error = refused(program, tmp_path)
    assert "inner calls the module 'inner' (Doubled), which was kept whole" in error.what
    assert "leaf=" in str(error.advice)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_python_function_is_refused_by_name(tmp_path: Path) -> None:
    program = qc.capture(Doubled(), (images(),))
    program.node("mul").target = doubled
    assert f"mul calls the Python function {doubled.__module__}:doubled" in refused(program, tmp_path).what


def test_an_op_that_reaches_outside_is_refused(tmp_path: Path) -> None:
    program = qc.capture(Doubled(), (images(),))
    output = program.node("output")
    program.emit(torch.ops.aten.from_file.default, ("/tmp/x", True, 4), before=output)
    assert "reaches out of the model" in refused(program, tmp_path).what


def test_a_program_without_numbers_is_refused(tmp_path: Path) -> None:
    program = qc.parse(qc.capture(small_model(), (images(),)).dump())
    assert "'conv.weight' has no numbers" in refused(program, tmp_path).what


def test_tensors_of_a_special_kind_are_refused(tmp_path: Path) -> None:
    program = qc.capture(small_model(), (images(),))
    conv = program.root.get_submodule("conv")
    conv.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8))
    node = program.node("conv_weight")
    node.target, node.meta["val"] = "conv.quantized", type_of_value(conv.quantized)
    assert "is torch.strided, torch.qint8" in refused(program, tmp_path).what


def test_buffers_that_share_written_memory_are_refused(tmp_path: Path) -> None:
    class Shared(nn.Module):
        seen: Tensor
        part: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("part", self.seen[:2])

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return x + self.part.sum()

    with pytest.raises(qc.errors.CaptureError, match="shares memory with 'part'"):
        qc.capture(Shared(), (images(),), method="fx")
    model = Shared()
    model.part = torch.zeros(2)
    program = qc.capture(model, (images(),), method="fx")
    program.root.register_buffer("part", program.root.get_buffer("seen")[:2])
    assert "shares memory with others: part, seen" in refused(program, tmp_path).what
    program.root.register_buffer("part", torch.zeros(2))
    program.save(tmp_path / "model.qc")


def test_example_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    program = qc.capture(small_model(), (images(),), dynamic_shapes=None)
    program.example_inputs = (images(), images())
    assert "2 example inputs for 1" in refused(program, tmp_path).what
    program.example_inputs = (images()[:1],)
    assert "has size 1 in dimension 0" in refused(program, tmp_path).what
    program.example_inputs = (images().to_sparse(),)
    assert "of a special kind" in refused(program, tmp_path).what


def test_a_broken_program_is_not_saved(tmp_path: Path) -> None:
    program = qc.capture(small_model(), (images(),))
    program.node("relu").name = "conv2d"
    with pytest.raises(qc.errors.VerifyError):
        program.save(tmp_path / "model.qc")
    assert list(tmp_path.iterdir()) == []
