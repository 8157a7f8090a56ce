"""A registry of plugins of any kind: listed without import, loaded by name, refused with who offers it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from quantc.errors import PluginError, UnknownNameError
from quantc.support.plugin_registry import Registry
from tests.support.distributions import write_distribution


def why_not(name: str, thing: Any) -> str | None:
    return None if isinstance(thing, int) else "it is not a number"


def numbers() -> Registry[int]:
    return Registry("number", "numbers", "quantc.test_numbers", why_not)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_plugins_of_this_session_are_held_by_name() -> None:
    registry = numbers()
    assert registry.register("two", 2) == 2
    registry.register("one", 1)
    assert (registry.names(), list(registry), registry["two"]) == (["one", "two"], ["one", "two"], 2)
    assert registry.provider("two") == "this session"
    registry.forget("two")
    registry.forget("two")
    assert "two" not in registry
    assert "one" in registry


def test_an_unknown_name_is_refused_with_the_closest() -> None:
    registry = numbers()
    registry.register("seven", 7)
    with pytest.raises(UnknownNameError, match="number 'sevn'") as caught:
        registry["sevn"]
    assert caught.value.advice is not None
    assert "seven" in caught.value.advice


def test_what_is_of_another_kind_is_not_registered() -> None:
    wrong: Any = "text"
    registry = numbers()
    with pytest.raises(PluginError, match="not a number"):
        registry.register("text", wrong)
    assert registry.names() == []


def test_another_definition_of_a_name_is_refused_and_the_same_one_replaces() -> None:
    registry: Registry[Any] = Registry("thing", "things", "quantc.test_things")

    def made(value: int) -> type:
        class Thing:
            number = value

        return Thing

    class Other:
        pass

    registry.register("thing", made(1))
    registry.register("thing", made(2))
    assert registry["thing"].number == 2
    with pytest.raises(PluginError, match="thing 'thing', from this session"):
        registry.register("thing", Other)


def test_entry_points_are_listed_without_import_and_loaded_by_name(folder: Path) -> None:
    registry = numbers()
    assert registry.names() == []
    write_distribution(folder, "some-numbers", "some_numbers", "SIX = 6\n", test_numbers={"six": "some_numbers:SIX"})
    assert registry.names() == ["six"]
    assert "some_numbers" not in sys.modules
    assert registry["six"] == 6
    assert registry.provider("six") == "some-numbers"
    with pytest.raises(PluginError, match="number 'six', from some-numbers"):
        registry.register("six", 66)


def test_broken_plugins_are_skipped_where_all_are_used_and_refused_by_name(folder: Path) -> None:
    entries = {"bad": "odd_numbers:BAD", "lost": "odd_numbers:LOST", "nine": "odd_numbers:NINE"}
    write_distribution(folder, "odd-numbers", "odd_numbers", "NINE, BAD = 9, 'nine'\n", test_numbers=entries)
    registry = numbers()
    assert registry.names() == ["bad", "lost", "nine"]
    assert dict(registry.usable()) == {"nine": 9}
    with pytest.raises(PluginError, match=r"'bad' of odd-numbers .* not a number"):
        registry["bad"]
    with pytest.raises(PluginError, match=r"'lost' of odd-numbers .* AttributeError") as caught:
        registry["lost"]
    assert caught.value.where is not None
    assert "odd_numbers:LOST" in caught.value.where


def test_two_offers_of_one_name_are_refused_with_both(folder: Path) -> None:
    for name in ("first-offer", "second-offer"):
        module = name.replace("-", "_")
        write_distribution(folder, name, module, "FIVE = 5\n", test_numbers={"five": f"{module}:FIVE"})
    with pytest.raises(PluginError, match="more than once") as caught:
        numbers()["five"]
    assert "first-offer" in caught.value.what
    assert "second-offer" in caught.value.what
