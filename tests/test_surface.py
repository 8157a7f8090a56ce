"""The surface of the package only grows: `tests/support/surface.py` says what belongs to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.surface import FILE, imported, surface

FROZEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def current() -> dict[str, Any]:
    return surface()


def is_within(frozen: list[str], found: list[str]) -> bool:
    """Whether all of a list is there still, in the same order."""
    rest = iter(found)
    return all(row in rest for row in frozen)


@pytest.mark.parametrize("name", FROZEN["names"])
def test_public_names_keep_their_parameters(name: str, current: dict[str, Any]) -> None:
    assert name in current["names"]
    assert is_within(FROZEN["names"][name], current["names"][name]), current["names"][name]


@pytest.mark.parametrize("name", FROZEN["commands"])
def test_commands_keep_their_options(name: str, current: dict[str, Any]) -> None:
    assert name in current["commands"]
    assert is_within(FROZEN["commands"][name], current["commands"][name]), current["commands"][name]


@pytest.mark.parametrize("group", FROZEN["plugins"])
def test_plugins_stay_registered(group: str, current: dict[str, Any]) -> None:
    assert is_within(FROZEN["plugins"][group], current["plugins"][group])


@pytest.mark.parametrize("path", FROZEN["imports"])
def test_documented_import_paths_stay(path: str) -> None:
    assert imported(path) is not None


def test_what_is_new_is_frozen_too(current: dict[str, Any]) -> None:
    assert current == FROZEN, "add it: python -m tests.support.surface"
