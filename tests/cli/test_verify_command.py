"""`quantc verify`: a file is read, checked and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.by_hand import two_layers
from tests.support.cli_runs import enter_folder, refuse, succeed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_folder(tmp_path, monkeypatch)


def test_a_file_is_read_checked_and_run() -> None:
    out = succeed("verify", "two.txt")
    assert "read" in out
    assert "no fault in 10 nodes, 1 graph" in out
    assert "1 output from the example inputs" in out


def test_a_saved_program_has_digests_that_agree(folder: Path) -> None:
    two_layers().save(folder / "two.qc")
    data = json.loads(succeed("verify", "two.qc", "--json"))
    findings = {row["checked"]: row["found"] for row in data["findings"]}
    assert findings["source"].endswith("every digest agrees")
    assert list(findings) == ["source", "rules of the IR", "run"]


def test_a_damaged_file_is_refused(folder: Path) -> None:
    two_layers().save(folder / "two.qc")
    content = bytearray((folder / "two.qc").read_bytes())
    content[-1] ^= 1
    (folder / "two.qc").write_bytes(content)
    assert "two.qc" in refuse("verify", "two.qc")
