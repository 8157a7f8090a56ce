"""The command line as a process: exit codes and the version."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cli_runs import quantc, succeed


@pytest.mark.parametrize("args", [["frobnicate"], ["run"], ["inspect", "--format", "jpeg"], ["inspect", "--nope"]])
def test_wrong_usage_is_exit_code_2(args: list[str]) -> None:
    result = quantc(*args)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_version() -> None:
    assert succeed("--version").startswith("quantc ")


@pytest.mark.parametrize("module", ["quantc", "quantc.cli"])
def test_python_runs_it_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "bogus"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No such command" in done.stderr
