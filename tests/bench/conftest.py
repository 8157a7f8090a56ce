"""Kernels that are timed are remembered in a folder: that of each test is its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTC_CACHE", str(tmp_path / "cache"))
