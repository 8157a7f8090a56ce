"""Training in two processes: the same parameters in both, and a program that converts to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("observe", ["moving-average", "lsq-plus"])
def test_two_processes_train_one_program(observe: str, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, "-m", "tests.support.distributed_training", str(tmp_path), observe]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"parameters.{rank}.pt", weights_only=True) for rank in range(2))
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name
    trained, converted = torch.load(tmp_path / "outputs.pt", weights_only=True)
    assert torch.equal(trained, converted)
