"""Passes, pipelines and backends by name: from packages, and from this session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quantc.errors import PluginError, UnknownNameError
from quantc.ir.program import Program
from quantc.passes.eliminate_dead import EliminateDead
from quantc.pipeline.pipeline import Pass, Pipeline
from quantc.pipeline.registry import BACKENDS, PASSES, PIPELINES, register_pass
from tests.support.distributions import write_distribution


class Step(Pass):
    """Does nothing."""

    name: ClassVar[str] = "test-step"

    def run(self, program: Program) -> bool:
        return False


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    PASSES.session.clear()
    PIPELINES.session.clear()


def test_registering_twice_is_an_error_but_running_a_cell_again_is_not() -> None:
    def cell(count: int) -> type[Pass]:
        class Session(Step):
            name: ClassVar[str] = "test-session"
            number: ClassVar[int] = count

        return register_pass(Session)

    cell(1)
    again = cell(2)
    assert PASSES["test-session"] is again
    with pytest.raises(PluginError, match="already a pass 'test-session', from this session"):

        @register_pass
        class Other(Step):
            name: ClassVar[str] = "test-session"

    with pytest.raises(PluginError, match="already a pass 'eliminate-dead', from quantc"):

        @register_pass
        class Dead(Step):
            name: ClassVar[str] = "eliminate-dead"


def test_only_passes_can_be_registered() -> None:
    wrong: Any = str
    with pytest.raises(PluginError, match="not a subclass"):
        PASSES.register("text", wrong)
    with pytest.raises(PluginError, match="named 'test-step', not 'other'"):
        PASSES.register("other", Step)


def test_an_unknown_name_is_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown pass 'eliminate-deed'"):
        PASSES["eliminate-deed"]


Distribution = Callable[..., None]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """Makes a package as pip would install it, in a folder that is on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return partial(write_distribution, tmp_path)


PLUGIN = """
from typing import ClassVar
from quantc.pipeline.pipeline import Pass, Pipeline

class Greet(Pass):
    "Says hello."
    name: ClassVar[str] = "greet"
    times: int = 1

    def run(self, program):
        return False

def salute(times: int = 2):
    return Pipeline((Greet(times=times),))
"""


def test_a_plugin_is_found_listed_without_import_and_used(distribution: Distribution) -> None:
    distribution(
        "fake-plugin",
        "fake_plugin_module",
        PLUGIN,
        passes={"greet": "fake_plugin_module:Greet"},
        pipelines={"salute": "fake_plugin_module:salute"},
        backends={"toaster": "fake_plugin_module:TOASTER"},
    )
    assert "greet" in PASSES.names()
    assert "salute" in PIPELINES
    assert "toaster" in BACKENDS
    assert "fake_plugin_module" not in sys.modules
    assert PASSES.provider("greet") == "fake-plugin"
    assert str(Pipeline.parse("greet{times=3},salute")) == "greet{times=3},greet{times=2}"


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("import no_such_thing_at_all", "broken_one:Greet", "cannot be imported: ModuleNotFoundError"),
        ("1 / 0", "broken_two:Greet", "cannot be imported: ZeroDivisionError"),
        ("", "broken_three:Greet", "cannot be imported: AttributeError"),
        ("Greet = 3", "broken_four:Greet", "is not usable: it is not a subclass"),
        (PLUGIN.replace('"greet"', '"meet"'), "broken_five:Greet", "is not usable: the class is named 'meet'"),
    ],
)
def test_a_broken_plugin_is_listed_and_named_when_used(
    distribution: Distribution, source: str, target: str, says: str
) -> None:
    distribution("bad-plugin", target.partition(":")[0], source, passes={"greet": target})
    assert "greet" in PASSES.names()
    assert "greet" not in dict(PASSES.usable())
    assert "eliminate-dead" in dict(PASSES.usable())
    with pytest.raises(PluginError, match=says) as caught:
        Pipeline.parse("greet")
    assert "bad-plugin" in caught.value.what
    assert target in str(caught.value.where)


def test_two_plugins_of_one_name_are_both_named(distribution: Distribution) -> None:
    distribution("plugin-one", "plugin_one", PLUGIN, passes={"greet": "plugin_one:Greet"})
    distribution("plugin-two", "plugin_two", PLUGIN, passes={"greet": "plugin_two:Greet"})
    assert PASSES.names().count("greet") == 1
    with pytest.raises(PluginError, match="offered more than once") as caught:
        Pipeline.parse("greet")
    assert "plugin-one (plugin_one:Greet)" in caught.value.what
    assert "plugin-two (plugin_two:Greet)" in caught.value.what


def test_in_tree_passes_come_through_the_same_door() -> None:
    assert PASSES.provider("eliminate-dead") == "quantc"
    assert PASSES["eliminate-dead"] is EliminateDead
    assert PIPELINES.provider("inference") == "quantc"
