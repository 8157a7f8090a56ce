"""Old import paths give the modules at their new places, and say so."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import quantc
from quantc.support.moved_modules import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_at_its_new_place(old: str) -> None:
    sys.modules.pop(f"quantc.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"quantc\.{old} has moved to quantc\.{MOVED[old]}"):
        given = importlib.import_module(f"quantc.{old}")
    assert given is importlib.import_module(f"quantc.{MOVED[old]}")
    assert given.__name__ == f"quantc.{MOVED[old]}"
    assert given.__spec__ is not None
    assert given.__spec__.name == f"quantc.{MOVED[old]}"


def test_modules_inside_of_moved_packages_are_found() -> None:
    sys.modules.pop("quantc.kernels.lowered", None)
    with pytest.warns(DeprecationWarning, match=r"quantc\.kernels\.lowered has moved"):
        given = importlib.import_module("quantc.kernels.lowered")
    assert given is importlib.import_module("quantc.targets.kernels.lowered")


def test_an_old_module_does_not_replace_a_function_of_its_name() -> None:
    importlib.import_module("quantc.parse")
    assert callable(quantc.parse)
    importlib.import_module("quantc.kernels.packed")
    assert quantc.kernels is importlib.import_module("quantc.targets.kernels")  # type: ignore[attr-defined]


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"quantc\.nothing"):
        importlib.import_module("quantc.nothing")
    with pytest.raises(ModuleNotFoundError), pytest.warns(DeprecationWarning, match="has moved"):
        importlib.import_module("quantc.kernels.nothing")


def test_quantc_itself_uses_no_old_path() -> None:
    code = """
import importlib, pkgutil, quantc
for found in pkgutil.walk_packages(quantc.__path__, "quantc."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error:quantc:DeprecationWarning", "-c", code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
