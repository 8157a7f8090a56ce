"""Freezing of norms and ranges late in a training, by hand and by schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import quantc as qc
from quantc.errors import TrainingError
from quantc.ir.program import Program
from quantc.qat.fake import FakeQuantizer, FollowedRange
from quantc.qat.freezing import Freezable
from quantc.qat.modes import ModeFlag
from quantc.qat.norms import FoldNorm, LiveNorm, UnfoldNorm
from quantc.qat.schedule import Schedule, freeze_norms, freeze_ranges, is_norm_part
from quantc.rewrite.affine_folding import Channels
from tests.support.training import batches, prepared, refused, small_model, small_prepared, trained


def test_what_is_frozen_stays() -> None:
    program = trained(prepared(), 3)
    assert qc.qat.freeze_norms(program) > 0
    assert qc.qat.freeze_norms(program) == 0
    qc.qat.freeze_ranges(program)
    before = copy.deepcopy(program.state_dict())
    x = batches(1)[0][0]
    torch.manual_seed(0)
    program.train()
    in_training = program(x)
    trained(program, 3)
    after = program.state_dict()
    still = ("running_mean", "running_var", "tracked", ".low", ".high", ".batches")
    for name, tensor in before.items():
        if name.endswith(still):
            assert torch.equal(tensor, after[name]), name
    assert not torch.equal(before["norm1.weight"], after["norm1.weight"])  # these are trained on
    assert in_training.requires_grad


def test_frozen_training_computes_what_eval_does() -> None:
    """But for dropout, which this model has none of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    x = batches(1)[0][0]
    program = qc.prepare(qc.capture(model.eval(), (x,)), "x86", qat=True)
    program(x)
    qc.qat.freeze_norms(program)
    qc.qat.freeze_ranges(program)
    assert torch.equal(program(x), program.eval()(x))


def test_a_schedule_freezes_on_time() -> None:
    program = prepared()
    optimizer = torch.optim.SGD(program.parameters(), lr=0.01)
    schedule = qc.qat.Schedule(freeze_norms=4, freeze_ranges=2)
    report = qc.qat.train(program, batches(6), functional.cross_entropy, optimizer, schedule=schedule)
    assert len(report.losses) == 6
    assert not report.without_gradient
    assert int(program.state_dict()["norm1.num_batches_tracked"]) == 3 + 4
    ranges = [fake for fake in program.root.modules() if isinstance(fake, FollowedRange)]
    assert {int(fake.batches) for fake in ranges} == {2}
    assert str(report).startswith("6 steps, loss ")


def test_schedules_count_from_one() -> None:
    with refused(TrainingError, "counted from 1"):
        qc.qat.Schedule(freeze_norms=0)


def frozen(program: Program) -> tuple[int, int]:
    """How many parts of norms, and how many fake quantizers, are frozen."""
    found = [module for module in program.root.modules() if isinstance(module, Freezable) and module.frozen]
    return sum(map(is_norm_part, found)), sum(isinstance(module, FakeQuantizer) for module in found)


def test_norms_and_ranges_are_frozen_apart() -> None:
    program = small_prepared()
    assert freeze_norms(program) == 2  # the folding before the conv, and the norm behind it
    assert frozen(program) == (2, 0)
    assert freeze_ranges(program.module) == 4  # of two inputs and two weights
    assert frozen(program) == (2, 4)
    assert (freeze_norms(program), freeze_ranges(program)) == (0, 0)


def test_a_model_that_is_not_trained_quantized_is_refused() -> None:
    for freeze in (freeze_norms, freeze_ranges):
        with pytest.raises(TrainingError, match="nothing") as caught:
            freeze(small_model())
        assert caught.value.where == "Sequential"


def test_parts_of_norms_are_told_from_other_modules() -> None:
    norm_parts = [FoldNorm(Channels(), 1e-5), LiveNorm(1e-5, 0.1), ModeFlag(True, False, "batch_norm")]
    others: list[nn.Module] = [ModeFlag(True, False, "dropout"), UnfoldNorm(Channels()), nn.BatchNorm2d(3), nn.ReLU()]
    assert all(is_norm_part(module) for module in norm_parts)
    assert not any(is_norm_part(module) for module in others)


def test_a_schedule_is_due_from_its_step_on_and_may_be_resumed_later() -> None:
    program = small_prepared()
    schedule = Schedule(freeze_norms=3, freeze_ranges=5)
    schedule.apply(program, 2)
    assert frozen(program) == (0, 0)
    schedule.apply(program, 3)
    assert frozen(program) == (2, 0)
    schedule.apply(program, 9)
    assert frozen(program) == (2, 4)
    never = small_prepared()
    Schedule().apply(never, 1000)
    assert frozen(never) == (0, 0)
