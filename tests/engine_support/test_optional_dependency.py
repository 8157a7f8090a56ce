"""Packages that may be missing: imported on demand, or refused with the extra to install."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quantc.errors import MissingDependencyError
from quantc.support.optional_dependency import extra, is_installed


def test_a_module_that_is_there_is_imported() -> None:
    assert extra("json", "onnx", "reading") is json


def test_a_missing_package_is_refused_with_its_extra_and_purpose() -> None:
    with pytest.raises(MissingDependencyError, match="no_such_package is not") as caught:
        extra("no_such_package.inner", "onnx", "writing ONNX files")
    assert caught.value.where == "writing ONNX files"
    assert caught.value.advice is not None
    assert "quantc[onnx]" in caught.value.advice


def test_a_dependency_of_a_package_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import the_other.part\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependencyError, match="the_other is not"):
        extra("needs_another", "onnx", "anything")


def test_looking_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explodes_when_imported.py").write_text("raise RuntimeError\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("json", "explodes_when_imported")
    assert "explodes_when_imported" not in sys.modules
    assert not is_installed("json", "no_such_package")
