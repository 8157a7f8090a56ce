"""`qc.lower`: which target a name stands for, and which options it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import quantc as qc
from quantc.errors import ConfigError, QuantcError, UnknownNameError
from quantc.ir.program import Program
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.target import TARGETS, suffixes
from quantc.verbs.lower import RUNTIMES, artifact_of, lower
from tests.support.store_files import calibrated, images


@pytest.fixture(scope="module")
def quantized() -> Program:
    return qc.convert(calibrated())


@pytest.mark.parametrize("target", ["x86", "qnnpack"])
def test_kernels_compute_the_program(quantized: Program, target: Any) -> None:
    module = lower(quantized, target)
    assert isinstance(module, Lowered)
    torch.testing.assert_close(module(images(3)), quantized(images(3)), atol=0.05, rtol=0)


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_the_name_of_a_runtime_is_answered_with_the_call_that_reaches_it(quantized: Program, name: str) -> None:
    with pytest.raises(UnknownNameError, match=name.upper()) as caught:
        lower(quantized, name.upper())
    advice = str(caught.value.advice)
    assert any(f'qc.lower(program, "{target}"' in advice for target in TARGETS)
    assert "known targets: " in advice


def test_a_misspelt_target_and_a_misspelt_option_are_answered_with_the_nearest(quantized: Program) -> None:
    with pytest.raises(UnknownNameError, match="x68") as caught:
        lower(quantized, "x68")
    assert "x86" in str(caught.value.advice)
    with pytest.raises(UnknownNameError, match="profil") as caught:
        lower(quantized, "onnx", profil="tensorrt")
    assert "profile" in str(caught.value.advice)
    with pytest.raises(UnknownNameError, match="profile"):
        lower(quantized, "x86", profile="tensorrt")


def test_a_program_of_weights_that_are_not_there_is_refused() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    program = qc.capture(model, (torch.randn(2, 3, device="meta"),))
    with pytest.raises(QuantcError, match="meta"):
        lower(program, "x86")


@pytest.mark.parametrize(
    ("name", "target"), [("net.onnx", "onnx"), ("NET.PTE", "executorch"), ("net.qc", None), ("net", None)]
)
def test_files_belong_to_targets_by_their_names(name: str, target: str | None) -> None:
    assert artifact_of(Path("somewhere") / name) == target


@pytest.mark.parametrize("name", ["net.tflite", "net.PLAN", "net.mlpackage"])
def test_files_of_other_tools_are_not_written(name: str) -> None:
    with pytest.raises(ConfigError, match=Path(name).suffix.lower()) as caught:
        artifact_of(Path(name))
    assert all(ending in str(caught.value.advice) for ending in (*suffixes(), ".qc"))
