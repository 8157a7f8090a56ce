"""What a `.pte` says of itself: who wrote it, from what, and how it is called."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.errors import LoadError
from quantc.targets.executorch.metadata import InputData, convention_in, metadata_of, read_metadata
from tests.support.executorch_models import conv, image, static


@pytest.mark.slow
def test_metadata_tells_versions_config_and_source() -> None:
    x = image()
    first = qc.lower(static(conv(), x), "executorch").metadata
    other = qc.lower(
        static(conv(), x, config=qc.QuantConfig().set_all(qc.INT8.but(eps=2.0**-12))), "executorch"
    ).metadata
    assert first is not None
    assert other is not None
    assert (first.quantc, first.executorch, first.torch) == (version("quantc"), version("executorch"), version("torch"))
    assert first.backend == "executorch"
    assert first.config != other.config
    assert first.source != other.source
    assert [(item.name, item.dtype, item.shape) for item in first.inputs] == [("input_1", "float32", [2, 4, 8, 8])]
    assert first.source == qc.lower(static(conv(), x), "onnx").metadata["quantc.source"], "one digest for both"


class Two(nn.Module):
    """A tensor, a number that is fixed, and a tensor of integers by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: int, *, index: Tensor) -> Any:
        return {"y": self.layer(x) * factor, "index": index}


@pytest.fixture(scope="module", name="program")
def _program() -> qc.Program:
    x, index = torch.randn(2, 4), torch.arange(3)
    sizes = {"x": {0: Dim("batch", min=1, max=8)}, "factor": None, "index": None}
    captured = qc.capture(Two().eval(), (x, 2), example_kwargs={"index": index}, dynamic_shapes=sizes)
    prepared = qc.prepare(captured, "executorch")
    qc.calibrate(prepared, [{"x": x, "factor": 2, "index": index}], progress="silent")
    return qc.convert(prepared)


def test_a_file_says_what_it_was_made_of(program: qc.Program) -> None:
    found = metadata_of(program, {"batch": (1, 8)}, has_state=True)
    assert (found.program, found.backend) == ("Two", "executorch")
    assert (found.torch, found.executorch, found.quantc) == (version("torch"), version("executorch"), version("quantc"))
    assert found.has_state
    assert found.ranges == {"batch": (1, 8)}
    assert [(item.name, item.dtype, item.shape) for item in found.inputs] == [
        ("x", "float32", ["batch", 4]),
        ("index", "int64", [3]),
    ]
    assert [item.is_rounded for item in found.inputs] == [True, False], (
        "the number is no input, and integers are not rounded"
    )


def test_the_source_is_the_program_that_was_given(program: qc.Program) -> None:
    fixed = program.clone()
    fixed.name = "Fixed"
    plain, other = metadata_of(fixed, {}), metadata_of(fixed, {}, source=program)
    assert (plain.program, other.program) == ("Fixed", "Two")
    assert other.source == metadata_of(program, {}).source


def test_it_comes_back_from_its_text(program: qc.Program) -> None:
    found = metadata_of(program, {"batch": (1, 8)})
    text = found.to_text()
    assert read_metadata(text, "model.pte") == found
    assert list(json.loads(text)) == sorted(json.loads(text)), "the same program is the same text"


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({"inputs": 3}, "inputs"),
        ({"more": 1}, "more"),
        ({"program": None}, "program"),
        ({"ranges": {"n": [1]}}, "ranges"),
    ],
)
def test_text_that_is_not_ours_is_refused_by_its_field(program: qc.Program, update: dict[str, Any], field: str) -> None:
    data = {**json.loads(metadata_of(program, {}).to_text()), **update}
    with pytest.raises(LoadError, match=field) as caught:
        read_metadata(json.dumps(data), "model.pte")
    assert caught.value.where == "model.pte"


@pytest.mark.parametrize("text", ["", "[]", "{}", "null"])
def test_text_that_is_no_metadata_is_refused(text: str) -> None:
    with pytest.raises(LoadError):
        read_metadata(text, "model.pte")


def test_the_way_to_call_it_comes_back(program: qc.Program) -> None:
    found = convention_in(read_metadata(metadata_of(program, {"batch": (1, 8)}).to_text(), "model.pte"), "model.pte")
    assert found.signature is not None
    assert [item.name for item in found.signature.inputs] == [item.name for item in program.signature.inputs]
    assert found.signature.in_spec == program.signature.in_spec
    assert found.signature.out_spec == program.signature.out_spec
    assert found.outputs == (..., ...)


def test_files_of_others_and_of_earlier_versions_are_called_flat(program: qc.Program) -> None:
    assert convention_in(None, "model.pte").signature is None
    assert convention_in(None, "model.pte").why_flat
    old = metadata_of(program, {}).model_copy(update={"call": None})
    assert convention_in(old, "model.pte").signature is None


def test_a_type_that_torch_does_not_have_is_refused(program: qc.Program) -> None:
    odd = InputData(name="x", dtype="float12", shape=[2])
    with pytest.raises(LoadError, match="float12"):
        convention_in(metadata_of(program, {}).model_copy(update={"inputs": [odd]}), "model.pte")
    sneaky = odd.model_copy(update={"dtype": "nn"})
    with pytest.raises(LoadError, match="'nn'"):
        convention_in(metadata_of(program, {}).model_copy(update={"inputs": [sneaky]}), "model.pte")
