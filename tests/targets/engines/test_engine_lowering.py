"""`qc.lower(program, "x86", engine=...)`: one kind of module, whichever engine runs it."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.errors import InputError, MissingDependencyError, ModeError, UnknownNameError
from quantc.support.optional_dependency import is_installed
from quantc.targets.engines import engine_lowering, engine_table
from quantc.targets.engines.engine_module import OnEngine
from quantc.targets.engines.engine_selection import Chosen
from quantc.targets.onnx.sessions import OnnxRuntime
from tests.support.onnx_models import close, quantized, seeded

needs_openvino = pytest.mark.skipif(not is_installed("openvino"), reason="needs the extra `openvino`")
OUTSIDE = ["onnxruntime", pytest.param("openvino", marks=needs_openvino)]


class Net(nn.Module):
    """An image and a number for each, by name, to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, image: Tensor, weight: Tensor) -> dict[str, Tensor]:
        pooled = torch.relu(self.conv(image)).mean((2, 3))
        return {"logits": self.head(pooled) * weight, "pooled": pooled}


def inputs(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = seeded(lambda: (torch.randn(batch, 3, 8, 8), torch.rand(batch, 1)), seed)
    return made


@pytest.fixture(scope="module")
def program() -> qc.Program:
    batch = Dim("batch")
    sizes = {"image": {0: batch}, "weight": {0: batch}}
    return quantized(seeded(Net), [inputs(2), inputs(2, 1)], dynamic_shapes=sizes)


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


@pytest.mark.parametrize("engine", OUTSIDE)
def test_inputs_that_do_not_lie_in_order(program: qc.Program, engine: str) -> None:
    module = qc.lower(program, "x86", engine=engine)
    image, weight = inputs(2)
    turned = image.transpose(2, 3)
    assert not turned.is_contiguous()
    assert close(program(turned, weight), module(turned, weight)) > 50
    assert close(program(image.to(memory_format=torch.channels_last), weight), module(image, weight)) > 50


@pytest.mark.parametrize("engine", OUTSIDE)
def test_what_would_be_hidden_is_refused(program: qc.Program, engine: str) -> None:
    module = qc.lower(program, "x86", engine=engine)
    image, weight = inputs(2)
    broken = image.clone()
    broken[0, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="'image' holds NaN"):
        module(broken, weight)
    with pytest.raises(InputError, match="requires a gradient"):
        module(image.requires_grad_(), weight)
    with torch.no_grad():
        module(image, weight)


@pytest.mark.parametrize("engine", OUTSIDE)
def test_results_stay_when_it_runs_again(program: qc.Program, engine: str) -> None:
    module = qc.lower(program, "x86", engine=engine)
    first = module(*inputs(2))
    kept = {name: value.clone() for name, value in first.items()}
    module(*inputs(2, 5))
    assert all(torch.equal(first[name], value) for name, value in kept.items())


@pytest.mark.parametrize("engine", OUTSIDE)
def test_several_threads_may_call_it(program: qc.Program, engine: str) -> None:
    module = qc.lower(program, "x86", engine=engine)
    given = [inputs(2, seed) for seed in range(8)]
    wanted = [module(*each)["logits"] for each in given]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: module(*given[index % 8])["logits"], range(64)))
    assert all(torch.equal(wanted[index % 8], value) for index, value in enumerate(found))


def test_what_onnx_runtime_reads_and_yields_is_not_copied(program: qc.Program) -> None:
    seen: list[int] = []

    class Spy:
        def __init__(self, session: Any) -> None:
            self.session = session

        def run(self, names: Any, feeds: dict[str, Any]) -> Any:
            seen.extend(array.ctypes.data for array in feeds.values())
            made = self.session.run(names, feeds)
            seen.extend(array.ctypes.data for array in made)
            return made

    module = qc.lower(program, "x86", engine="onnxruntime")
    session = module._session()
    session._session = Spy(session._session)
    image, weight = inputs(2)
    found = module(image, weight)
    assert seen == [image.data_ptr(), weight.data_ptr(), *(value.data_ptr() for value in found.values())]


def test_threads_are_those_of_torch_unless_given(program: qc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def load(model: bytes, threads: int) -> Any:
        asked.append(threads)
        return OnnxRuntime(model, threads)

    engine = replace(engine_table.ENGINES["onnxruntime"], load=load)
    follows, fixed = OnEngine(program, engine), OnEngine(program, engine, 3)
    torch.set_num_threads(2)
    try:
        follows(*inputs(2))
        fixed(*inputs(2))
    finally:
        torch.set_num_threads(1)
    assert asked == [1, 3, 2]


@pytest.mark.parametrize("engine", [*OUTSIDE, "auto"])
def test_it_copies_and_tells(program: qc.Program, engine: str, tmp_path: Any) -> None:
    module = qc.lower(program, "x86", engine=engine)
    wanted = module(*inputs(2))["logits"]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own
        assert torch.equal(twin(*inputs(2))["logits"], wanted)
    data = json.loads(module.to_json())
    assert data["target"] == "x86"
    assert data["engine"] in str(module)
    assert "Net on x86, run by" in repr(module)
    module.save(tmp_path / "program.qc")
    assert close(qc.load(tmp_path / "program.qc", portable=True)(*inputs(2)), program(*inputs(2))) > 50
    with pytest.raises(ModeError, match="cannot be trained"):
        module.train()


def test_it_says_if_another_backend_suits_the_engine(program: qc.Program) -> None:
    assert "prepared for" not in str(qc.lower(program, "x86", engine="onnxruntime"))
    other = qc.lower(quantized(seeded(Net), [inputs(2)], "x86"), "x86", engine="onnxruntime")
    assert "than if prepared for onnx" in str(other)
    assert other.to_data()["note"] == other.note


# -- auto ----------------------------------------------------------------------------------------------------------


def test_auto_keeps_the_fastest(program: qc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = qc.lower(program, "x86", engine="auto")
    assert isinstance(chosen, Chosen)
    times = {row.engine: row.milliseconds for row in chosen.measured if row.milliseconds is not None}
    assert {"torch", "onnxruntime"} <= set(times)
    assert chosen.engine == min(times, key=lambda name: times[name])
    assert all(row.sqnr is not None and row.sqnr > 30 for row in chosen.measured if row.engine in times)
    assert "why not" in str(chosen)


class Wrong:
    """A session that is fast, and off by a tenth."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.ones(2, 4), torch.ones(2, 8)]


def failing(model: bytes, threads: int) -> Any:
    raise RuntimeError("the engine broke\nin two lines")


def test_auto_takes_no_engine_that_computes_something_else(
    program: qc.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine_table.ENGINES["onnxruntime"]
    engines = {
        "wrong": replace(real, name="wrong", load=lambda model, threads: Wrong()),
        "broken": replace(real, name="broken", load=failing),
        "missing": replace(real, name="missing", packages=("no_such_package",)),
    }
    monkeypatch.setattr(engine_lowering, "ENGINES", engines)
    chosen = qc.lower(program, "x86", engine="auto")
    assert chosen.engine == "torch"
    reasons = {row.engine: row.why_not for row in chosen.measured}
    assert "less than" in reasons["wrong"]
    assert reasons["broken"] == "the engine broke"
    assert "pip install 'quantc[onnx]'" in reasons["missing"]


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
