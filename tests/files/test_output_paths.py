"""What is written where: names that say something else are refused, and no file of somebody else's is replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

import quantc as qc
from quantc.cli.app import app
from quantc.errors import SaveError

MODELS = """
import torch
from torch import nn

def complete():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    return model, (torch.ones(2, 4),), [torch.randn(2, 4)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "output_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("output_models", None)
    yield tmp_path
    sys.modules.pop("output_models", None)


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def succeed(*args: str) -> str:
    result = quantc(*args)
    assert result.exit_code == 0, result.output
    return result.stderr


def refuse(*args: str) -> str:
    result = quantc(*args)
    assert result.exit_code == 1, result.output
    assert "what to do: " in result.stderr
    return result.stderr


def converted(backend: str = "x86") -> qc.Result:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    return qc.quantize(model, (torch.ones(2, 4),), [torch.randn(2, 4)], backend)


def test_every_file_is_named_before_it_is_written(folder: Path) -> None:
    told = succeed("quantize", "output_models:complete", "--out", "model.qc")
    assert "to be written: model.qc (program), model.x86.qc (artifact), model.html (report)" in told
    before = set(folder.iterdir())
    succeed("quantize", "output_models:complete", "--out", "model.qc")  # what it wrote itself it replaces
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["model.qc", "model.x86.qc", "model.html"])
def test_quantize_replaces_no_file_of_others(name: str, folder: Path) -> None:
    (folder / name).write_text("my own notes")
    told = refuse("quantize", "output_models:complete", "--out", "model.qc")
    assert f"{name} is there, and is no " in told
    assert "capture ..." not in told  # before the work is done
    assert (folder / name).read_text() == "my own notes"
    assert len([path for path in folder.iterdir() if path.stem.startswith("model")]) == 1


def test_run_replaces_no_tensors_of_others(folder: Path) -> None:
    """A text has its tensors beside it, under a name that weights go by."""
    save_file({"mine": torch.ones(1)}, folder / "model.safetensors")
    assert "model.safetensors is there" in refuse("run", "canonicalize", "output_models:complete", "--out", "model.txt")
    assert list(load_file(folder / "model.safetensors")) == ["mine"]
    (folder / "model.safetensors").unlink()
    told = succeed("run", "canonicalize", "output_models:complete", "--out", "model.txt")
    assert "written to model.txt, model.safetensors, model.inputs.safetensors" in told
    succeed("run", "canonicalize", "model.txt", "--out", "model.txt")


def test_a_folder_where_nothing_can_be_written_is_told_before_the_work(folder: Path) -> None:
    (folder / "file").write_text("no folder")
    told = refuse("quantize", "output_models:complete", "--out", "file/deep/model.qc")
    assert "cannot be written: Not a directory" in told
    assert "capture ..." not in told
    assert not (folder / "deep").exists()


def test_a_checkpoint_that_cannot_be_written_is_told_before_the_first_batch(folder: Path) -> None:
    (folder / "file").write_text("no folder")
    prepared = qc.prepare(qc.capture(nn.Sequential(nn.Linear(4, 8)).eval(), (torch.ones(2, 4),)), "x86")

    def batches() -> Iterator[torch.Tensor]:
        yield pytest.fail("a batch was taken")

    for place, why in (("file", "Not a directory"), ("missing", "No such file or directory")):
        with pytest.raises(SaveError, match=f"cannot be written: {why}"):
            qc.calibrate(prepared, batches(), checkpoint=folder / place / "seen.safetensors")
    qc.calibrate(prepared, [torch.ones(2, 4)], checkpoint=folder / "seen.ckpt")  # whatever it is called
    assert (folder / "seen.ckpt").is_file()


@pytest.mark.parametrize("ending", ["qc", "txt", "json", "dot", "graphml"])
def test_inspect_replaces_its_own_files_only(ending: str, folder: Path) -> None:
    (folder / f"mine.{ending}").write_text("{}")
    assert "is there" in refuse("inspect", "output_models:complete", "--out", f"mine.{ending}")
    assert (folder / f"mine.{ending}").read_text() == "{}"
    for _ in range(2):
        succeed("inspect", "output_models:complete", "--out", f"own.{ending}")


@pytest.mark.parametrize(
    ("ending", "backend"), [(".onnx", "onnx"), pytest.param(".pte", "executorch", marks=pytest.mark.slow)]
)
def test_a_file_for_another_runtime_says_which_backend_to_use(ending: str, backend: str, folder: Path) -> None:
    pytest.importorskip(backend)
    told = refuse("quantize", "output_models:complete", "--out", f"model{ending}")
    assert f"would be for {backend}, and the program is quantized for x86" in told
    assert f"give --backend {backend}, or --out model.qc for x86" in told
    (folder / f"model{ending}").write_text("a model of my own")
    told = refuse("quantize", "output_models:complete", "--backend", backend, "--out", f"model{ending}")
    assert f"model{ending} is there" in told
    (folder / f"model{ending}").unlink()
    for _ in range(2):
        succeed("quantize", "output_models:complete", "--backend", backend, "--out", f"model{ending}")


def test_a_damaged_onnx_file_is_not_compared(folder: Path) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    made = converted("onnx")
    made.save(folder / "model.qc")
    qc.lower(made.program, "onnx").save(folder / "model.onnx")
    assert onnx.load(str(folder / "model.onnx")).metadata_props[-1].key == "quantc.seal"
    runtime.InferenceSession(str(folder / "model.onnx"))
    assert quantc("compare", "model.qc", "model.onnx").exit_code == 0
    whole = (folder / "model.onnx").read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 100, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (folder / "model.onnx").write_bytes(damaged)
        assert "it is not what was sealed" in refuse("compare", "model.qc", "model.onnx")
