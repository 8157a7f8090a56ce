"""What can go wrong in training, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from tests.support.training import SMALL_BATCH, refused, sgd, small_model, small_prepared, small_program


def test_convert_before_any_step() -> None:
    with refused(TrainingError, "was not trained", "prepared.train()"):
        qc.convert(small_prepared())


def test_eval_before_any_step() -> None:
    trained = small_prepared().eval()
    with refused(TrainingError, "no batch has gone through it"):
        trained(SMALL_BATCH[0])


def test_training_a_converted_program() -> None:
    trained = small_prepared()
    trained(SMALL_BATCH[0])
    converted = qc.convert(trained)
    with refused(ModeError, "qat=True"):
        converted.train()
    with refused(TrainingError, "was not prepared for training", "qat=True"):
        qc.qat.train(converted, [SMALL_BATCH], functional.cross_entropy, sgd(trained))
    with refused(QuantcError, "already prepared"):
        qc.prepare(converted, "x86", qat=True)


def test_training_what_was_prepared_for_inference() -> None:
    static = qc.prepare(small_program(), "x86")
    with refused(ModeError, "qat=True"):
        static.train()
    with refused(TrainingError, "qat=True"):
        qc.qat.freeze_norms(static)


def test_a_program_in_training_mode_is_not_prepared_for_inference() -> None:
    with refused(ModeError, "qat=True"):
        qc.prepare(small_program().train(), "x86")


def test_calibrating_what_is_trained() -> None:
    with refused(CalibrationError, "while it does"):
        qc.calibrate(small_prepared(), [SMALL_BATCH[0]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_none(bad: float) -> None:
    trained = small_prepared()
    x = SMALL_BATCH[0].clone()
    x[0, 0, 0, 0] = bad
    with refused(InputError, "holds " + ("NaN" if bad != bad else "infinity")):
        trained(x)
    with refused(DataError, "1 of 432 values are NaN or infinite", "conv2d:in0"):
        trained.module(x)  # NaN that comes up inside is found where it is rounded
    trained(SMALL_BATCH[0])  # what was refused has left no trace
    assert torch.isfinite(trained.eval()(SMALL_BATCH[0])).all()


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "4.weight"])
def test_converting_what_has_diverged(name: str) -> None:
    trained = small_prepared()
    trained(SMALL_BATCH[0])
    trained.state_dict()[name].fill_(torch.nan)
    with refused(QuantcError, "NaN"):
        qc.convert(trained)


def test_learned_scales_need_training() -> None:
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe="lsq"))
    with refused(SpecError, "qat=True"):
        qc.prepare(small_program(), "x86", config=config)
    with pytest.raises(QuantcError):
        qc.UINT8.but(observe="trained")


def test_nothing_to_train() -> None:
    frozen = small_model()
    frozen.requires_grad_(False)
    with refused(TrainingError, "no parameter that takes a gradient"):
        qc.prepare(qc.capture(frozen, (SMALL_BATCH[0],)), "x86", qat=True)


def test_saving_in_the_middle(tmp_path: Any) -> None:
    with refused(SaveError, "state_dict"):
        small_prepared().save(tmp_path / "half.qc")


def test_the_state_of_something_else() -> None:
    with refused(LoadError, "this is not the state"):
        small_prepared().load_state_dict(small_model().state_dict())
