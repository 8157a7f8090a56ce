"""`qc.lower(program, "x86", engine=...)`: one kind of module, whichever engine runs it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import InputError, MissingDependencyError, UnknownNameError
from quantc.targets.engines import engine_table
from tests.support.engine_models import OUTSIDE, Net, engine_program, inputs
from tests.support.onnx_models import close, seeded


@pytest.fixture
def program() -> qc.Program:
    return engine_program()


@pytest.mark.parametrize("engine", ["torch", *OUTSIDE, "auto"])
def test_it_is_called_like_the_model(program: qc.Program, engine: str) -> None:
    module = qc.lower(program, "x86", engine=engine)
    assert isinstance(module, nn.Module)
    assert not module.training
    for batch in (2, 5, 1):
        image, weight = inputs(batch, 7)
        wanted, found = program(image, weight), module(image, weight)
        assert list(found) == ["logits", "pooled"]
        assert close(wanted, found) > 50
    with pytest.raises(InputError):
        module(torch.randn(2, 3, 9, 9), torch.rand(2, 1))


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said(program: qc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="onnxruntime"):
        qc.lower(program, "x86", engine="onnx")
    with pytest.raises(qc.QuantcError, match="options of torch's kernels"):
        qc.lower(program, "x86", engine="onnxruntime", tune=True)
    with pytest.raises(qc.QuantcError, match="read the Q/DQ form"):
        qc.lower(qc.lower(program, "x86"), "x86", engine="onnxruntime")
    with pytest.raises(qc.QuantcError, match="is not quantized"):
        qc.lower(qc.capture(seeded(Net).eval(), inputs(2)), "x86", engine="onnxruntime")
    bare = program.clone()
    bare.example_inputs = None
    with pytest.raises(qc.QuantcError, match="no example inputs"):
        qc.lower(bare, "x86", engine="auto")


@pytest.mark.parametrize(("engine", "package"), [("onnxruntime", "onnxruntime"), ("openvino", "openvino")])
def test_without_the_package_the_extra_is_named(
    program: qc.Program, engine: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_table, "is_installed", lambda *names: package not in names)
    extra = engine_table.ENGINES[engine].extra
    with pytest.raises(MissingDependencyError, match=rf"pip install 'quantc\[{extra}\]'"):
        qc.lower(program, "x86", engine=engine)
    chosen = qc.lower(program, "x86", engine="auto")
    assert extra in {row.engine: row.why_not for row in chosen.measured}[engine]


def test_importing_quantc_imports_no_engine() -> None:
    import subprocess

    code = "import sys, quantc; print(any(name in sys.modules for name in ('onnx', 'onnxruntime', 'openvino')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
