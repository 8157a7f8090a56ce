"""Placement: ops are replaced by kernels, one of several candidates each, and the whole has the last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quantc as qc
from quantc.targets.kernels import placement
from tests.support.toy_kernels import AsWritten, InFloat, chosen, offer_toys, program


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return offer_toys(monkeypatch, tmp_path)


def test_the_whole_has_the_last_word(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are the fastest each by itself need not be so together."""
    seen: list[dict[str, Any]] = []

    def raced(forms: dict[str, Any], inputs: Any) -> dict[str, float]:
        seen.append({name: [float(part.sum()) for part in run(*inputs)] for name, run in forms.items()})
        return {name: 1.0 if name == "table" else 2.0 for name in forms}

    monkeypatch.setattr(placement, "race", raced)
    lowered = qc.lower(program(), target, tune=True)
    assert list(seen[0]) == ["measured", "table"]
    assert seen[0]["measured"] == pytest.approx(seen[0]["table"])
    assert chosen(lowered) == [("slow", "whole"), ("slow", "whole")]
    assert set(lowered.choices.values()) == {"slow"}
    assert chosen(qc.lower(program(), target, tune=True)) == [("slow", "whole"), ("slow", "whole")]
    assert len(seen) == 1  # remembered


def test_float_is_taken_only_where_it_is_allowed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsWritten, "seconds", 0.001)
    monkeypatch.setattr(InFloat, "seconds", 0.0, raising=False)
    assert chosen(qc.lower(program(), target, tune=True))[0][0] == "quick"
    assert chosen(qc.lower(program(), target, tune=True, allow_float=True))[0][0] == "in float"
