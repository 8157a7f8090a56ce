"""`quantc quantize`: what it prints where, and wrong usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_runs import enter_folder, quantc, succeed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_folder(tmp_path, monkeypatch)


def test_the_report_goes_to_stdout_and_files_to_stderr(folder: Path) -> None:
    result = quantc("quantize", "cli_models:plain", "--mode", "weight-only", "--out", "net.qc")
    assert result.exit_code == 0, result.output
    assert "net.qc" not in result.stdout
    assert "program written to net.qc" in result.stderr
    assert (folder / "net.qc").is_file()
    assert "\x1b" not in result.stdout


def test_with_json_the_report_is_one_document() -> None:
    data = json.loads(succeed("quantize", "cli_models:plain", "--mode", "weight-only", "--json"))
    assert (data["name"], data["out"]) == ("Sequential", None)


def test_wrong_usage_is_exit_code_2() -> None:
    result = quantc("quantize", "cli_models:plain")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--data" in result.stderr
    assert quantc("quantize", "--bakend", "x86").exit_code == 2
    assert quantc("quantize", "cli_models:plain", "--method", "guess").exit_code == 2
    assert quantc("quantize", "cli_models:plain", "--mode", "dynamical").exit_code == 2


def test_recovery_is_a_flag_or_passes() -> None:
    given = ("quantize", "cli_models:plain", "--data", "cli_models:batches", "--json")
    plain, every, some = (
        json.loads(succeed(*given, *more))
        for more in ((), ("--recover", "--reduce-range", "no"), ("--recover-passes", "correct-bias"))
    )
    assert plain["recovery"] is None
    assert [each["pass"].partition("{")[0] for each in every["recovery"]][-2:] == ["round", "correct-bias"]
    assert [each["pass"] for each in some["recovery"]] == ["correct-bias"]
    assert any(site["fate"] == "kept" for each in every["recovery"] for site in each["sites"])
    none = quantc(*given, "--recover-passes", "")
    assert none.exit_code == 1
    assert "no passes are named" in none.stderr


@pytest.mark.slow
def test_a_process_of_its_own_keeps_stdout_clean() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from quantc.cli.app import main; main()",
            "quantize",
            "cli_models:plain",
            "--mode",
            "weight-only",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["name"] == "Sequential"
