"""The ONNX model that `qc.lower` gives: it is saved in one file or two, run, printed, copied and pickled."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import LoadError, ModeError, SaveError
from quantc.targets.onnx import onnx_module
from quantc.targets.onnx.seal import check_seal
from tests.support.onnx_models import close, image_batches, quantized, seeded, small_cnn


@pytest.fixture(scope="module")
def images() -> list[tuple[Tensor, ...]]:
    return image_batches()


@pytest.fixture(scope="module")
def program(images: list[tuple[Tensor, ...]]) -> qc.Program:
    return quantized(seeded(small_cnn), images)


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


def test_a_model_is_written_with_a_seal_that_protobuf_reads_over(program: qc.Program, tmp_path: Path) -> None:
    model = qc.lower(program, "onnx")
    model.save(str(tmp_path / "model.onnx"))
    read = onnx.load(str(tmp_path / "model.onnx"))
    assert read.graph == model.proto.graph
    check_seal(tmp_path / "model.onnx")
    with pytest.raises(SaveError, match="is no path"):
        model.save(3)  # type: ignore[arg-type]


def test_a_session_is_made_anew_for_another_number_of_threads(program: qc.Program, images: Any) -> None:
    model, threads = qc.lower(program, "onnx"), torch.get_num_threads()
    try:
        made = []
        for count in (1, 1, 2):
            torch.set_num_threads(count)
            made.append(model(*images[0]))
            assert model._session is not None
            assert model._session[0] == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1])
    assert close(made[0], made[2]) > 60


def test_it_tells_of_itself(program: qc.Program) -> None:
    model = qc.lower(program, "onnx")
    data = model.to_data()
    assert (data["program"], data["target"]) == ("Sequential", "onnx")
    assert data["nodes"] == len(model.proto.graph.node)
    assert data["bytes"] == len(model.proto.SerializeToString())
    assert data["metadata"]["quantc.profile"] == model.profile == "onnxruntime"
    assert model.headline == f"Sequential in ONNX: {data['nodes']} nodes, {data['bytes']:,} bytes"
    assert str(model).splitlines()[0] == model.headline


def test_copies_keep_the_profile(program: qc.Program) -> None:
    model = qc.lower(program, "onnx", profile="tensorrt")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert twin.profile == "tensorrt"
        assert twin.proto == model.proto


def test_lowering_leaves_the_program_alone(program: qc.Program) -> None:
    before = program.dump()
    assert qc.lower(program, "onnx").program is program
    assert program.dump() == before
