"""What a first user meets at the command line and in a session: versions, names, factories, pickles, and plugins."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import quantc as qc
from quantc.cli.app import app
from quantc.errors import LoadError, SaveError, UnknownNameError
from quantc.inspect.coverage import Verdict
from quantc.observe.minmax import MinMax
from quantc.observe.observation_registry import OBSERVATIONS

MODELS = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(3, 8)

    def forward(self, a, b):
        return torch.relu(self.left(a) + self.right(b))

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()

def two():
    torch.manual_seed(0)
    return Two().eval()

def stream():
    for seed in range(3):
        yield torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))

def empty():
    return []
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "first_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("first_models", None)
    yield tmp_path
    sys.modules.pop("first_models", None)


def quantc(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def sequential() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def result() -> qc.Result:
    return qc.quantize(sequential(), (X,), [X])


def test_the_version_is_known() -> None:
    assert quantc("--version").stdout.strip() == f"quantc {qc.__version__}"


# -- factories that give a model alone ---------------------------------------------------------------------------------


def test_a_model_alone_takes_its_example_inputs_from_an_array(folder: Path) -> None:
    np.savez(folder / "images.npz", np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32))
    done = quantc("quantize", "first_models:plain", "--data", "images.npz", "--out", "model.qc")
    assert done.exit_code == 0, done.output
    assert qc.load(folder / "model.qc").example_inputs is not None


def test_a_model_alone_takes_its_example_inputs_from_arrays_by_name(folder: Path) -> None:
    chance = np.random.default_rng(0)
    arrays = {
        "b": chance.standard_normal((8, 3), dtype=np.float32),
        "a": chance.standard_normal((8, 4), dtype=np.float32),
    }
    np.savez(folder / "both.npz", a=arrays["a"], b=arrays["b"])
    done = quantc("quantize", "first_models:two", "--data", "both.npz", "--out", "model.qc")
    assert done.exit_code == 0, done.output
    np.savez(folder / "odd.npz", a=arrays["a"], c=arrays["b"])
    done = quantc("quantize", "first_models:two", "--data", "odd.npz")
    assert done.exit_code == 1
    assert "the arrays are a, c, and the model takes a, b" in done.stderr


def test_a_model_alone_takes_its_example_inputs_from_batches_and_loses_none(folder: Path) -> None:
    done = quantc("quantize", "first_models:plain", "--data", "first_models:stream", "--json")
    assert done.exit_code == 0, done.output
    assert '"batches": 3' in done.stdout


def test_a_model_alone_without_batches_is_refused() -> None:
    done = quantc("quantize", "first_models:plain", "--data", "first_models:empty")
    assert done.exit_code == 1
    assert "Traceback" not in done.output


# -- explain -----------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.LogSigmoid(), nn.Linear(8, 4))
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(self.block(x))
        return found


def test_explain_takes_the_path_of_a_module() -> None:
    prepared = qc.prepare(qc.capture(Nested().eval(), (X,)), "x86")
    one = prepared.explain("block.2")
    assert one.row.module == "block.2"
    assert one.others == ()
    assert str(one) == str(prepared.explain(one.row.node))
    block = prepared.explain("block")
    assert [row.row.module for row in (block, *block.others)] == ["block.1", "block.0", "block.2"]  # float comes first
    assert block.verdict is Verdict.FLOAT
    assert all(row.row.node in str(block) for row in block.others)
    assert len(block.to_data()["others"]) == 2


def test_a_node_that_is_called_like_another_module_says_so() -> None:
    prepared = qc.prepare(qc.capture(Nested().eval(), (X,)), "x86")
    found = prepared.explain("linear")  # the first linear op, and not the module of that name
    assert found.row.module == "block.0"
    assert any("linear is also a module, whose ops are others: linear_2" in note for note in found.notes)


def test_explain_of_what_is_not_there_knows_modules_too() -> None:
    prepared = qc.prepare(qc.capture(Nested().eval(), (X,)), "x86")
    with pytest.raises(UnknownNameError) as caught:
        prepared.explain("block.3")
    assert "block.0" in str(caught.value.advice)


def test_explain_on_the_command_line_takes_paths(folder: Path) -> None:
    result().prepared.save(folder / "prepared.qc")
    told = quantc("explain", "prepared.qc", "2")
    assert told.exit_code == 0, told.output
    assert "linear_1 (linear, 2" in told.stdout
    qc.capture(sequential(), (X,)).save(folder / "captured.qc")
    told = quantc("explain", "captured.qc", "2")
    assert told.exit_code == 0, told.output
    assert "linear_1" in told.stdout


# -- names of runtimes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("openvino", 'qc.lower(program, "x86", engine="openvino")'),
        ("OpenVINO", 'qc.lower(program, "x86", engine="openvino")'),
        ("ort", 'qc.lower(program, "x86", engine="onnxruntime")'),
        ("tensorrt", 'qc.lower(program, "onnx", profile="tensorrt")'),
        ("x68", "did you mean x86"),
        ("ONNX", "did you mean onnx"),
    ],
)
def test_runtimes_that_are_no_targets_say_how_they_are_had(target: str, advice: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        qc.lower(result().program, target)
    assert advice in str(caught.value.advice)
    assert "executorch, onnx, qnnpack, x86" in str(caught.value.advice)


@pytest.mark.parametrize(
    ("engine", "meant"), [("ort", "onnxruntime"), ("OpenVINO", "openvino"), ("openvin", "openvino")]
)
def test_engines_are_known_by_other_names(engine: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown engine {engine!r}") as caught:
        qc.lower(result().program, "x86", engine=engine)
    assert caught.value.advice == f"did you mean {meant}? Known engines: auto, onnxruntime, openvino, torch"


# -- pickles and copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["captured", "prepared", "program"])
def test_programs_are_pickled_and_copied(what: str) -> None:
    program = getattr(result(), what)
    stored = io.BytesIO()
    torch.save(program, stored)
    stored.seek(0)
    for twin in (
        torch.load(stored, weights_only=False),
        pickle.loads(pickle.dumps(program)),  # noqa: S301 - of our own making
        copy.deepcopy(program),
        copy.copy(program),
    ):
        assert twin.dump() == program.dump()
        assert torch.equal(twin(X), program(X))
    twin.root.get_submodule("0")
    with torch.no_grad():
        for tensor in twin.root.state_dict().values():
            tensor.zero_()
    assert not torch.equal(twin(X), program(X))  # nothing is shared


def test_a_copy_keeps_its_plan() -> None:
    """Facts about nodes follow the nodes of the copy."""
    prepared = result().prepared
    twin = copy.deepcopy(prepared)
    assert str(twin.coverage()) == str(prepared.coverage())
    assert torch.equal(qc.convert(twin)(X), qc.convert(prepared)(X))


def test_a_result_is_pickled_with_its_report() -> None:
    made = result()
    twin = pickle.loads(pickle.dumps(made))  # noqa: S301 - of our own making
    assert torch.equal(twin(X), made(X))
    assert str(twin.report) == str(made.report)


def test_what_a_file_cannot_hold_is_not_pickled() -> None:
    training = qc.prepare(qc.capture(sequential().train(), (X,)), "x86", qat=True)
    with pytest.raises(SaveError, match="which is for training"):
        torch.save(training, io.BytesIO())


# -- plugins -----------------------------------------------------------------------------------------------------------


class Theirs(MinMax):
    """An observation of somebody else's."""

    statistics: ClassVar[str] = "theirs"


def test_a_converted_program_needs_no_plugin_that_observed(folder: Path) -> None:
    OBSERVATIONS.register("theirs", Theirs)
    try:
        config = qc.QuantConfig().set_all(qc.UINT8.but(observe="theirs"))
        made = qc.quantize(sequential(), (X,), [X], config=config)
        made.prepared.save(folder / "prepared.qc")
        forms: dict[str, Any] = {
            "qdq": made.program,
            "integer": qc.convert(made.prepared, "integer"),
            "x86": qc.lower(made.program, "x86"),
        }
        expected = {name: form(X) for name, form in forms.items()}
        for name, form in forms.items():
            form.save(folder / f"{name}.qc")
    finally:
        OBSERVATIONS.forget("theirs")
    for name in forms:
        loaded = qc.load(folder / f"{name}.qc")
        assert torch.equal(loaded(X), expected[name])
        loaded.save(folder / "again.qc")
        assert torch.equal(qc.load(folder / "again.qc")(X), expected[name])
    program = qc.load(folder / "qdq.qc")
    assert any("no package offers 'theirs' here" in note for note in program.log[-1].notes)
    assert torch.equal(qc.lower(program, "x86")(X), expected["x86"])
    with pytest.raises(LoadError, match="unknown observation 'theirs'"):
        qc.load(folder / "prepared.qc")
