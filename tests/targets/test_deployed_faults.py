"""What users get wrong with deployed models, or do in an odd way: right numbers, or an error of quantc's that says what to do."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from typer.testing import CliRunner

import quantc as qc
from quantc.cli.app import app
from quantc.errors import (
    ConfigError,
    InputError,
    LoadError,
    MissingDependencyError,
    QuantcError,
    RefusedError,
    SaveError,
    UnknownNameError,
)
from quantc.ir.program import Program
from quantc.support.optional_dependency import extra
from quantc.verbs.lower import artifact_of

pytest.importorskip("executorch")
pytest.importorskip("onnxruntime")
BATCH = 2
TARGETS = ("executorch", "onnx")
NEAR = 0.02
"""Of the largest value: a step or two of a small network's grids."""


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(*layers).eval()


def image(count: int = BATCH) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@cache
def quantized(backend: str) -> Program:
    program = qc.capture(network(), (image(),), dynamic_shapes=({0: Dim("batch", min=1, max=16)},))
    return qc.quantize(program, None, [(image(),)], backend).program


@cache
def deployed(target: str) -> Any:
    return qc.lower(quantized(target), target)


def is_near(want: Tensor, got: Tensor) -> bool:
    return bool((want - got).abs().max() <= NEAR * want.abs().max())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "odd",
    [
        lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
        lambda x: nn.Parameter(x, requires_grad=False),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: torch.cat([x, x], dim=3)[..., :8],
        lambda x: x[:1, :1, :1, :1].expand(5, 3, 8, 8),
    ],
    ids=["the other sign", "a parameter", "channels last", "a part of another", "expanded"],
)
def test_tensors_that_lie_otherwise_in_memory(target: str, odd: Any) -> None:
    x = odd(image())
    plain = torch.empty(x.shape).copy_(x)
    assert is_near(quantized(target)(plain), deployed(target)(x))


@pytest.mark.parametrize("target", TARGETS)
def test_layouts_that_runtimes_do_not_read_are_refused_also_after_a_call(target: str) -> None:
    deployed(target)(image())
    with pytest.raises(InputError, match="layout") as caught:
        deployed(target)(image().to_sparse())
    assert "to_dense" in str(caught.value)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("odd", "advice"),
    [
        (lambda: image().double(), "give x.to(torch.float32)"),
        (lambda: image().tolist(), "a list of 384 values"),
    ],
    ids=["float64", "lists"],
)
def test_what_is_no_float32_tensor_says_what_to_do(target: str, odd: Any, advice: str) -> None:
    with pytest.raises(InputError) as caught:
        deployed(target)(odd())
    assert advice in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("target", TARGETS)
def test_arrays_are_taken_for_tensors(target: str) -> None:
    assert torch.equal(deployed(target)(image().numpy()), deployed(target)(image()))


@pytest.mark.parametrize("target", TARGETS)
def test_files_that_cannot_be_written(target: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing/model", "folder", "pipe"):
        with pytest.raises(SaveError, match="cannot be written"):
            deployed(target).save(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "pipe"}


def test_a_pte_is_known_by_how_it_begins(tmp_path: Path) -> None:
    deployed("executorch").save(tmp_path / "model.bin")
    loaded = qc.load(tmp_path / "model.bin")
    assert torch.equal(loaded(image()), deployed("executorch")(image()))
    with pytest.raises(LoadError, match="holds no program"):
        qc.load(tmp_path / "model.bin", portable=True)


def test_onnx_files_are_not_loaded_and_it_says_what_runs_them(tmp_path: Path) -> None:
    deployed("onnx").save(tmp_path / "model.onnx")
    with pytest.raises(LoadError, match="holds no program") as caught:
        qc.load(tmp_path / "model.onnx")
    assert "onnxruntime.InferenceSession" in str(caught.value)


@pytest.mark.parametrize("largest", [0, -3, "8", {"batch": 0}, {"batsh": 4}, 2.5])
def test_sizes_to_set_memory_aside_for_that_are_none(largest: Any) -> None:
    with pytest.raises(RefusedError) as caught:
        qc.lower(quantized("executorch"), "executorch", largest=largest)
    assert "largest" in str(caught.value)


def test_a_size_that_is_named_gets_no_more_memory() -> None:
    lowered = qc.lower(quantized("executorch"), "executorch", largest={"batch": 4})
    assert lowered.metadata is not None
    assert lowered.metadata.ranges == {"batch": (1, 4)}
    assert lowered(image(4)).shape == (4, 4)
    with pytest.raises(InputError):
        lowered(image(5))


@pytest.mark.parametrize("partitioners", [5, ["xnnpack"], [None]])
def test_partitioners_that_are_none(partitioners: Any) -> None:
    with pytest.raises(RefusedError, match="is no partitioner"):
        qc.lower(quantized("executorch"), "executorch", partitioners=partitioners)


@pytest.mark.parametrize("threads", [0, -1, "2", True, 1.5])
def test_threads_that_are_none(threads: Any) -> None:
    with pytest.raises(RefusedError, match="threads is"):
        qc.lower(quantized("onnx"), "x86", engine="onnxruntime", threads=threads)


def test_a_profile_that_is_no_text() -> None:
    with pytest.raises(UnknownNameError, match="unknown profile 3"):
        qc.lower(quantized("onnx"), "onnx", profile=3)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("target", TARGETS)
def test_weights_with_channels_last(target: str, channels: int) -> None:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(channels, 8, 3, 2, 1), nn.Conv2d(8, 4, 3)
    for conv in convolutions:
        conv.weight = nn.Parameter(conv.weight.to(memory_format=torch.channels_last))
    model = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1]).eval()
    x = torch.randn(2, channels, 12, 12)
    program = qc.quantize(model, (x.to(memory_format=torch.channels_last),), [(x,)], target).program
    assert is_near(program(x), qc.lower(program, target)(x))


@pytest.mark.parametrize("backend", ["onnx", "x86", "executorch"])
def test_models_in_other_floats_are_told_to_be_float32(backend: str) -> None:
    program = qc.capture(nn.Linear(8, 8).double().eval(), (torch.randn(2, 8).double(),))
    with pytest.raises(QuantcError) as caught:
        qc.prepare(program, backend)
    assert "only float32 tensors are quantized" in str(caught.value)
    assert "model.float()" in str(caught.value)


# -- packages that are not installed -------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hides packages, as if they were not installed."""

    def hide(*names: str) -> None:
        def find(name: str, package: str | None = None) -> Any:
            return None if name in names else importlib.util.find_spec(name, package)

        monkeypatch.setattr("quantc.support.optional_dependency.find_spec", find)

    return hide


def test_a_model_can_be_written_without_the_runtime(without: Any) -> None:
    without("onnxruntime")
    written = qc.lower(quantized("onnx"), "onnx")
    assert "onnxruntime, which would say what it fuses, is not installed" in str(written)
    assert written.to_data()["fusions"] is None


def test_the_engine_says_which_package_is_missing(without: Any) -> None:
    without("onnxruntime", "openvino")
    auto = qc.lower(quantized("onnx"), "x86", engine="auto")
    told = str(auto)
    assert auto.engine == "torch"
    assert "the only engine that can be taken" in told
    assert "onnxruntime is not installed: pip install 'quantc[onnx]'" in told
    with pytest.raises(MissingDependencyError, match="onnxruntime is not installed"):
        qc.lower(quantized("onnx"), "x86", engine="onnxruntime")


def test_a_package_that_failed_to_import_before_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyError for parts of a package whose own import broke off."""

    def broken(name: str) -> Any:
        raise KeyError(name)

    monkeypatch.setattr("quantc.support.optional_dependency.import_module", broken)
    with pytest.raises(MissingDependencyError, match="executorch is not installed"):
        extra("executorch.backends.xnnpack", "executorch", "files")


# -- the command line ----------------------------------------------------------------------------------------------


def test_files_of_other_tools_are_refused_before_the_work_is_done(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantc writes no \.tflite files") as caught:
        artifact_of(tmp_path / "model.tflite")
    assert ".onnx or .pte" in str(caught.value)
    done = CliRunner().invoke(app, ["quantize", "--out", str(tmp_path / "model.tflite")])
    assert done.exit_code == 1
    assert "calibrating" not in done.output
    assert not list(tmp_path.iterdir())


def test_endings_in_capitals_are_the_same() -> None:
    assert artifact_of(Path("MODEL.PTE")) == "executorch"
    assert artifact_of(Path("model.Onnx")) == "onnx"
    assert artifact_of(Path("model.qc")) is None
