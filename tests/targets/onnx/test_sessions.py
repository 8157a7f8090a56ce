"""ONNX sessions: tensors in and out without copies, and the model as ONNX Runtime optimizes it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from quantc.errors import MissingDependencyError
from quantc.targets.onnx.sessions import OnnxRuntime, OpenVino, as_array, as_tensor
from tests.support.onnx_ops import drawn, exported


def test_an_array_shares_the_memory_of_a_tensor_that_lies_in_order() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    array = as_array(x)
    array[1, 2] = 9
    assert x[1, 2] == 9
    turned = as_array(x.t())
    assert turned.flags.c_contiguous
    assert np.array_equal(turned, x.numpy().T)
    negative = torch.complex(x, x).conj().imag
    assert np.array_equal(as_array(negative), -x.numpy())
    assert np.array_equal(as_array(x.clone().requires_grad_()), x.numpy())


def test_a_tensor_shares_the_memory_of_an_array_that_may_be_written() -> None:
    array = np.arange(3.0)
    as_tensor(array)[0] = 7
    assert array[0] == 7
    array.flags.writeable = False
    found = as_tensor(array)
    found[0] = 1
    assert array[0] == 7
    assert as_tensor(np.float32(2.5)).shape == ()


def test_a_model_runs_from_bytes_and_from_a_file(tmp_path: Path) -> None:
    model = exported(lambda a, b: (a - 2 * b, b.abs()), drawn(3), drawn(3, seed=1)).model
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path))
    for session in (OnnxRuntime(model.SerializeToString(), 1), OnnxRuntime(str(path), 2)):
        assert session.names == ["x", "y"]
        made = session([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, 0.0, 0.5])])
        assert [each.tolist() for each in made] == [[3.0, 2.0, 2.0], [1.0, 0.0, 0.5]]


def test_as_many_tensors_as_inputs_are_wanted() -> None:
    session = OnnxRuntime(exported(torch.relu, drawn(3)).model.SerializeToString(), 1)
    with pytest.raises(ValueError, match="zip"):
        session([drawn(3), drawn(3)])


def test_the_optimized_model_has_fewer_nodes_and_the_same_numbers() -> None:
    x = drawn(2, 4)
    model = exported(lambda x: torch.relu(x.reshape(4, 2).reshape(2, 4) @ torch.eye(4) + 0.5), x).model
    found = OnnxRuntime.optimized(model.SerializeToString())
    assert len(found.graph.node) < len(model.graph.node)
    (want,), (got,) = (OnnxRuntime(each.SerializeToString(), 1)([x]) for each in (model, found))
    assert torch.allclose(want, got)


@pytest.mark.parametrize(("package", "extra"), [("onnxruntime", "onnx"), ("openvino", "openvino")])
def test_without_the_engine_the_extra_is_named(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"quantc\[{extra}\]"):
        OnnxRuntime(b"", 1) if package == "onnxruntime" else OpenVino(b"", 1)
