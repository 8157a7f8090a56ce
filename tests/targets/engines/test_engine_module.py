"""A program on an engine outside torch, as a module."""

from __future__ import annotations

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import quantc as qc
from quantc.errors import InputError, ModeError
from quantc.targets.engines import engine_table
from quantc.targets.engines.engine_module import OnEngine
from quantc.targets.onnx.sessions import OnnxRuntime
from tests.support.engine_models import OUTSIDE, Net, engine_program, inputs
from tests.support.onnx_models import close, quantized, seeded


@pytest.fixture
def program() -> qc.Program:
    return engine_program()


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
