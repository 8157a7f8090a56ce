"""`engine="auto"`: engines are timed on the program's own inputs, and the fastest that agrees is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import QuantcError
from quantc.targets.engines import engine_lowering, engine_selection, engine_table
from quantc.targets.engines.engine_selection import MAX_RUNS, MIN_RUNS, Chosen, choose
from tests.support.engine_models import engine_program


@pytest.fixture
def program() -> qc.Program:
    return engine_program()


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


# -- the choice itself, on a clock that only the modules move ------------------------------------------------------------


class Timed(nn.Module):
    """The identity, off by a share of what it is given, after a while."""

    def __init__(self, clock: list[float], *seconds: float, off: float = 0.0) -> None:
        super().__init__()
        self.clock, self.seconds, self.off, self.calls = clock, seconds, off, 0

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.seconds[self.calls % len(self.seconds)]
        self.calls += 1
        return x * (1 + self.off)

    def to_data(self) -> dict[str, Any]:
        return {"off": self.off}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(engine_selection, "perf_counter", lambda: now[0])
    return now


def identity() -> qc.Program:
    return qc.capture(nn.Identity(), (torch.arange(1.0, 9.0),))


def chosen_of(modules: Mapping[str, nn.Module], **reasons: str) -> Chosen:
    return choose(identity(), {name: partial(modules.__getitem__, name) for name in modules}, reasons)


def test_the_least_time_of_each_counts_in_milliseconds(clock: list[float]) -> None:
    steady, moody = Timed(clock, 0.5), Timed(clock, 9.0, 9.0, 0.25)
    chosen = chosen_of({"torch": steady, "other": moody})
    assert chosen.engine == "other"
    assert chosen.chosen is moody
    assert {row.engine: row.milliseconds for row in chosen.measured} == {"torch": 500.0, "other": 250.0}
    assert chosen.headline == "Identity on x86, run by other, the fastest of 2 engines"


def test_engines_have_their_turns_within_the_time_they_are_given(clock: list[float]) -> None:
    quick, slow = Timed(clock, 1e-9), Timed(clock, 1e9)
    chosen_of({"torch": quick})
    assert quick.calls == 1 + MAX_RUNS
    chosen_of({"torch": slow})
    assert slow.calls == 1 + MIN_RUNS


def test_others_need_come_no_closer_than_torch_does(clock: list[float]) -> None:
    # an error of a tenth is 20 dB: more than 6 dB less than an exact engine's 30, and not than torch's own 20
    coarse = {"torch": Timed(clock, 2.0, off=0.1), "other": Timed(clock, 1.0, off=0.19)}
    assert chosen_of(coarse).engine == "other"
    exact = {"torch": Timed(clock, 2.0), "other": Timed(clock, 1.0, off=0.04), "near": Timed(clock, 1.5, off=0.03)}
    chosen = chosen_of(exact)
    assert chosen.engine == "near"
    assert {row.engine: row.why_not for row in chosen.measured}["other"] == "less than 30.0 dB"
    assert exact["other"].calls == 1


def test_an_engine_that_yields_nan_is_not_taken(clock: list[float]) -> None:
    chosen = chosen_of({"torch": Timed(clock, 2.0), "other": Timed(clock, 1.0, off=float("nan"))})
    assert chosen.engine == "torch"


def test_if_none_agrees_each_is_named_with_its_reason(clock: list[float]) -> None:
    with pytest.raises(QuantcError, match="no engine computes what Identity says") as caught:
        choose(identity(), {"one": lambda: Timed(clock, 1.0, off=0.5)}, {"two": "two is not installed"})
    assert caught.value.where == "two: two is not installed; one: less than 30.0 dB"


def test_faults_of_an_engine_are_its_reason_and_those_of_the_code_are_raised(clock: list[float]) -> None:
    def fails(error: Exception) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            raise error

        return make

    own = {"torch": lambda: Timed(clock, 1.0)}
    chosen = choose(identity(), own | {"other": fails(QuantcError("no kernel\nat all"))}, {})
    assert [row.why_not for row in chosen.measured] == ["", "no kernel"]
    assert chosen.headline.endswith("run by torch, the only engine that can be taken")
    with pytest.raises(TypeError, match="a slip"):
        choose(identity(), own | {"other": fails(TypeError("a slip"))}, {})


def test_measurements_are_told_in_text_and_in_json(clock: list[float]) -> None:
    chosen = chosen_of({"torch": Timed(clock, 0.25)}, other="not installed")
    data = json.loads(chosen.to_json())
    assert data["chosen"] == {"off": 0.0}
    assert data["measured"] == [
        {"engine": "other", "milliseconds": None, "sqnr": None, "why_not": "not installed"},
        {"engine": "torch", "milliseconds": 250.0, "sqnr": "inf", "why_not": ""},
    ]
    assert "250.00" in str(chosen)
    assert torch.equal(chosen(torch.ones(8)), torch.ones(8))
