"""The seal of an ONNX file: one more entry of metadata, a digest of all before it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from quantc.errors import LoadError
from quantc.targets.onnx.seal import check_seal, data_file, seal_model


@pytest.fixture(scope="module")
def content() -> bytes:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", ends[:1], ends[1:])
    made: bytes = helper.make_model(graph).SerializeToString()
    return made


def test_protobuf_reads_the_seal_as_metadata(content: bytes) -> None:
    model = onnx.load_from_string(seal_model(content))
    onnx.checker.check_model(model)
    (entry,) = model.metadata_props
    assert (entry.key, entry.value) == ("quantc.seal", sha256(content).hexdigest())
    assert model.graph == onnx.load_from_string(content).graph


def test_the_digest_of_weights_in_a_file_of_their_own_is_told_before(content: bytes, tmp_path: Path) -> None:
    weights = data_file(tmp_path / "model.onnx")
    assert weights == tmp_path / "model.onnx.data"
    weights.write_bytes(b"weights")
    model = onnx.load_from_string(seal_model(content, weights))
    assert [entry.key for entry in model.metadata_props] == ["quantc.data", "quantc.seal"]
    assert model.metadata_props[0].value == sha256(b"weights").hexdigest()


def test_any_byte_that_changes_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    whole = seal_model(content)
    path.write_bytes(whole)
    check_seal(path)
    start = len(whole) - 64
    for place in (*range(0, len(content), 7), start, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(LoadError, match="damaged") as caught:
            check_seal(path)
        assert caught.value.where == str(path)


def test_files_of_others_are_not_checked(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for other in (content, b"", seal_model(content) + b"\x72\x00"):
        path.write_bytes(other)
        check_seal(path)


@pytest.mark.parametrize("change", ["other", "cut", "gone"])
def test_weights_that_are_not_those_that_were_sealed_are_named(content: bytes, change: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    weights = data_file(path)
    weights.write_bytes(b"weights")
    path.write_bytes(seal_model(content, weights))
    check_seal(path)
    if change == "gone":
        weights.unlink()
    else:
        weights.write_bytes(b"weight" if change == "cut" else b"Weights")
    with pytest.raises(LoadError, match="damaged") as caught:
        check_seal(path)
    assert caught.value.where == str(weights)
