"""ExecuTorch: programs of quantc beside those of its own quantizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.bench import mobile
from quantc.bench.contenders import weights_of
from quantc.bench.models import Task
from quantc.bench.race import closeness

pytest.importorskip("executorch")


@pytest.fixture(scope="module")
def task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 8)).eval()
    batches = [(torch.randn(32, 128),) for _ in range(4)]
    return Task("tiny", model, batches[:2], batches[2:])


BUILDERS: dict[str, Any] = {
    "quantc": mobile.quantc_static,
    "quantc, dynamic": mobile.quantc_dynamic,
    "own": mobile.xnnpack(),
    "own, dynamic": mobile.xnnpack(is_dynamic=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("own") else ()) for name in BUILDERS]
)
def test_a_program_runs_there_close_to_the_float_model(name: str, task: Task) -> None:
    built = BUILDERS[name](task)
    assert closeness(task.model, built.run, task.unseen) > 25
    assert built.weight_bytes is not None
    assert 0.25 < built.weight_bytes / weights_of(task.model) < 0.6, "a byte for each weight, and the rest of the file"
    assert built.lowered is None


def test_a_program_that_was_read_is_not_captured_again(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    program = qc.capture(task.model, task.calibration[0])
    monkeypatch.setattr(qc, "capture", lambda *_: pytest.fail("captured again"))
    assert mobile._capture(Task("read", program.module, task.calibration, task.unseen, program)) is program
