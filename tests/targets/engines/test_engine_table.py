"""The engines that can run a program on x86, by name, and what is said where one is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantc.errors import MissingDependencyError, UnknownNameError
from quantc.pipeline.registry import BACKENDS
from quantc.targets.engines import engine_table
from quantc.targets.engines.engine_table import ENGINES, SHORT, TORCH, engine_of
from quantc.targets.onnx.profiles import PROFILES


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are installed; none until a test adds some."""
    found: set[str] = set()
    monkeypatch.setattr(engine_table, "is_installed", lambda *names: found.issuperset(names))
    return found


def test_an_engine_whose_packages_are_there_is_given_by_name(only: set[str]) -> None:
    only.update({"onnx", "onnxruntime"})
    assert engine_of("onnxruntime") is ENGINES["onnxruntime"]
    assert ENGINES["onnxruntime"].why_not() is None


@pytest.mark.parametrize("name", ENGINES)
def test_all_missing_packages_are_named_with_the_extra_that_brings_them(name: str, only: set[str]) -> None:
    engine = ENGINES[name]
    with pytest.raises(MissingDependencyError, match=f"onnx, {name} are not installed") as caught:
        engine_of(name)
    assert caught.value.advice == f"pip install 'quantc[{engine.extra}]'"
    assert engine.why_not() == f"onnx, {name} are not installed: pip install 'quantc[{engine.extra}]'"


def test_one_missing_package_is_named_alone(only: set[str]) -> None:
    only.add("onnx")
    assert ENGINES["openvino"].missing == "openvino is not installed"


@pytest.mark.parametrize(("name", "meant"), [*SHORT.items(), ("ONNX", "onnxruntime"), ("openvin", "openvino")])
def test_what_engines_are_also_called_leads_to_their_name(name: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"engine {name!r}") as caught:
        engine_of(name)
    assert f"did you mean {meant}?" in str(caught.value.advice)
    assert "auto, onnxruntime, openvino, torch" in str(caught.value.advice)


def test_torch_is_no_engine_outside_torch() -> None:
    with pytest.raises(UnknownNameError):
        engine_of(TORCH)


@pytest.mark.parametrize("name", ENGINES)
def test_rows_of_the_table_name_profiles_and_backends_that_exist(name: str) -> None:
    engine = ENGINES[name]
    assert engine.name == name
    assert engine.profile in PROFILES
    assert set(engine.suited) <= set(BACKENDS)
    assert replace(engine, packages=()).why_not() is None
