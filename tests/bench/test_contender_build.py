"""A contender's build of a model: how it is run, and how large it is."""

from __future__ import annotations

import torch

import quantc as qc
from quantc.bench.contender_build import Built
from quantc.bench.contenders import weights_of
from tests.support.bench_tasks import tiny_task


def test_a_lowered_module_is_run_and_weighed_and_its_floor_can_be_had() -> None:
    task = tiny_task()
    prepared = qc.prepare(qc.capture(task.model, task.calibration[0]), "x86")
    qc.calibrate(prepared, task.calibration, progress="silent")
    lowered = qc.lower(qc.convert(prepared), "x86")
    built = Built.of_lowered(lowered)
    (x,) = task.unseen[0]
    assert torch.equal(built.run(x), lowered(x))
    assert built.lowered is lowered
    assert built.weight_bytes is not None
    assert 0.25 < built.weight_bytes / weights_of(task.model) < 0.5, "a byte for each weight, and scales"


def test_what_runs_elsewhere_has_no_floor_and_may_have_no_size() -> None:
    built = Built(abs, None)
    assert built.run(-3) == 3
    assert (built.weight_bytes, built.lowered) == (None, None)
