"""`quantc explain`: rules tried at a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_runs import enter_folder, quantc, refuse, succeed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_folder(tmp_path, monkeypatch)


def test_explain_prints_the_rules_that_were_tried() -> None:
    out = succeed("explain", "cli_models:model", "batch_norm")
    assert "conv-bn" in out
    data = json.loads(succeed("explain", "cli_models:model", "batch_norm", "--json"))
    assert data["matched"] == "conv-bn"
    table = ("--table", "quantc.patterns.fusions:FUSIONS")
    assert succeed("explain", "cli_models:model", "batch_norm", *table) == out


def test_explain_refuses_what_it_does_not_know() -> None:
    assert "did you mean relu" in refuse("explain", "two.txt", "rellu")
    assert "unknown backend 'toaster'" in refuse("explain", "two.txt", "relu", "--backend", "toaster")
    assert "is a type, not a rule table" in refuse("explain", "two.txt", "relu", "--table", "pathlib:Path")
    assert quantc("explain", "two.txt", "relu", "--table", "a:b", "--backend", "c").exit_code == 2
