"""What can go wrong in training, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quantc as qc
from quantc.errors import (
    CalibrationError,
    DataError,
    InputError,
    LoadError,
    ModeError,
    QuantcError,
    SaveError,
    SpecError,
    TrainingError,
)
from quantc.ir.program import Program

BATCH = (torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4,)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()


def program() -> Program:
    return qc.capture(model(), (BATCH[0],))


def prepared(**options: Any) -> Program:
    return qc.prepare(program(), "x86", qat=True, **options)


def sgd(trained: Program, rate: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained.parameters(), lr=rate)


def refused(kind: type[QuantcError], *words: str) -> Any:
    """The error, and that it says what, where and what to do."""

    class Check:
        def __enter__(self) -> Check:
            self.context = pytest.raises(kind)
            self.info = self.context.__enter__()
            return self

        def __exit__(self, *details: Any) -> Any:
            done = self.context.__exit__(*details)
            error = self.info.value
            assert error.where, "it does not say where"
            assert error.advice, "it does not say what to do"
            for word in words:
                assert word in str(error)
            return done

    return Check()


def test_convert_before_any_step() -> None:
    with refused(TrainingError, "was not trained", "prepared.train()"):
        qc.convert(prepared())


def test_eval_before_any_step() -> None:
    trained = prepared().eval()
    with refused(TrainingError, "no batch has gone through it"):
        trained(BATCH[0])


def test_no_batches() -> None:
    trained = prepared()
    with refused(TrainingError, "there were no batches"):
        qc.qat.train(trained, [], functional.cross_entropy, sgd(trained))


def test_training_a_converted_program() -> None:
    trained = prepared()
    trained(BATCH[0])
    converted = qc.convert(trained)
    with refused(ModeError, "qat=True"):
        converted.train()
    with refused(TrainingError, "was not prepared for training", "qat=True"):
        qc.qat.train(converted, [BATCH], functional.cross_entropy, sgd(trained))
    with refused(QuantcError, "already prepared"):
        qc.prepare(converted, "x86", qat=True)


def test_training_what_was_prepared_for_inference() -> None:
    static = qc.prepare(program(), "x86")
    with refused(ModeError, "qat=True"):
        static.train()
    with refused(TrainingError, "qat=True"):
        qc.qat.freeze_norms(static)


def test_a_program_in_training_mode_is_not_prepared_for_inference() -> None:
    with refused(ModeError, "qat=True"):
        qc.prepare(program().train(), "x86")


def test_calibrating_what_is_trained() -> None:
    with refused(CalibrationError, "while it does"):
        qc.calibrate(prepared(), [BATCH[0]])


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "nan": (lambda y, t: functional.cross_entropy(y, t) * torch.nan, "the loss is nan"),
    "infinite": (lambda y, t: functional.cross_entropy(y, t) / 0.0, "the loss is inf"),
    "detached": (lambda y, t: functional.cross_entropy(y.detach(), t), "depends on no parameter"),
    "of something else": (
        lambda y, t: nn.Parameter(torch.ones(())) * y.detach().mean(),
        "no parameter was given a gradient",
    ),
    "nan gradients": (lambda y, t: torch.sqrt(y - y).sum(), "gradients are NaN"),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_that_teach_nothing(name: str) -> None:
    trained = prepared()
    loss, words = LOSSES[name]
    with refused(TrainingError, words, "step 3"):
        qc.qat.train(trained, [BATCH], loss, sgd(trained), first_step=3)


def test_an_optimizer_of_the_model_trains_nothing() -> None:
    own = model()
    trained = qc.prepare(qc.capture(own, (BATCH[0],)), "x86", qat=True)
    with refused(TrainingError, "prepared.parameters()"):
        qc.qat.train(trained, [BATCH], functional.cross_entropy, torch.optim.SGD(own.parameters(), lr=0.1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_none(bad: float) -> None:
    trained = prepared()
    x = BATCH[0].clone()
    x[0, 0, 0, 0] = bad
    with refused(InputError, "holds " + ("NaN" if bad != bad else "infinity")):
        trained(x)
    with refused(DataError, "1 of 432 values are NaN or infinite", "conv2d:in0"):
        trained.module(x)  # NaN that comes up inside is found where it is rounded
    trained(BATCH[0])  # what was refused has left no trace
    assert torch.isfinite(trained.eval()(BATCH[0])).all()


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "4.weight"])
def test_converting_what_has_diverged(name: str) -> None:
    trained = prepared()
    trained(BATCH[0])
    trained.state_dict()[name].fill_(torch.nan)
    with refused(QuantcError, "NaN"):
        qc.convert(trained)


def test_learned_scales_need_training() -> None:
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe="lsq"))
    with refused(SpecError, "qat=True"):
        qc.prepare(program(), "x86", config=config)
    with pytest.raises(QuantcError):
        qc.UINT8.but(observe="trained")


def test_nothing_to_train() -> None:
    frozen = model()
    frozen.requires_grad_(False)
    with refused(TrainingError, "no parameter that takes a gradient"):
        qc.prepare(qc.capture(frozen, (BATCH[0],)), "x86", qat=True)


def test_saving_in_the_middle(tmp_path: Any) -> None:
    with refused(SaveError, "state_dict"):
        prepared().save(tmp_path / "half.qc")


def test_the_state_of_something_else() -> None:
    with refused(LoadError, "this is not the state"):
        prepared().load_state_dict(model().state_dict())


def test_schedules_count_from_one() -> None:
    with refused(TrainingError, "counted from 1"):
        qc.qat.Schedule(freeze_norms=0)
