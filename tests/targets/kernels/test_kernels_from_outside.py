"""Kernels of another chip, in a package: nothing of quantc's own is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.targets.kernels.kernel_table import KERNELS
from quantc.testing import check_backend
from tests.support.distributions import write_distribution
from tests.support.paths import ROOT, TESTS

X = torch.linspace(-2, 2, 40).reshape(5, 8)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installed in a folder of its own; what it registers goes with it."""
    source = (TESTS / "support" / "kernel_package.py").read_text(encoding="utf-8")
    groups = {"backends": {"toychip": "toychip:BACKEND"}, "targets": {"toychip": "toychip:TARGET"}}
    write_distribution(tmp_path, "toychip", "toychip", source, **groups)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toychip", raising=False)
    yield tmp_path
    KERNELS.pop("toychip", None)
    sys.modules.pop("toychip", None)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.Sigmoid()).eval()


@pytest.mark.usefixtures("package")
def test_a_package_brings_kernels_and_their_pipeline(tmp_path: Path) -> None:
    steps = qc.pipelines.lower("toychip")
    assert "place-kernels{target=toychip}" in str(steps)
    prepared = qc.prepare(qc.capture(model(), (X,)), "toychip")
    qc.calibrate(prepared, [X], progress="silent")
    made = qc.lower(qc.convert(prepared), "toychip", hooks=[qc.hooks.Verify(), qc.hooks.Guard()])
    integer = qc.convert(prepared, to="integer")
    assert [row.kernel for row in made.placed if row.op == "linear"] == ["numpy linear"] * 2
    assert torch.equal(made(X), integer(X))
    made.save(tmp_path / "made.qc")
    program = "import quantc as qc, torch; made = qc.load('made.qc'); print(made.target, f'{made(torch.ones(5, 8)).sum():.6f}')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert found.stdout == f"toychip {integer(torch.ones(5, 8)).sum():.6f}\n", found.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_the_kit_takes_it() -> None:
    check_backend("toychip").raise_if_failed()
