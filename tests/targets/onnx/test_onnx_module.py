"""The ONNX model that `qc.lower` gives: it is saved in one file or two, run, printed, copied and pickled."""

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
from quantc.errors import LoadError, SaveError
from quantc.targets.onnx import onnx_module
from quantc.targets.onnx.seal import check_seal


def test_a_model_too_large_for_one_file_is_written_whole_and_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    model = qc.lower(qc.quantize(wide, (torch.ones(2, 64),), [torch.randn(2, 64)], "onnx").program, "onnx")
    before = model.proto.SerializeToString()
    monkeypatch.setattr(onnx_module, "LARGEST_MESSAGE", 1000)
    model.save(tmp_path / "model.onnx")
    assert model.proto.SerializeToString() == before
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    x = torch.randn(2, 64)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    (made,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(made), model(x))
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    check_seal(tmp_path / "model.onnx")
    for name in ("model.onnx", "model.onnx.data"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(LoadError, match="not what was sealed") as caught:
            check_seal(tmp_path / "model.onnx")
        assert caught.value.where == str(tmp_path / name)
        (tmp_path / name).write_bytes(whole)
