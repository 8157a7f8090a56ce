"""`qc.prepare`: a plan for a backend, in a copy of the program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import ModeError, QuantcError, SpecError
from quantc.ir.program import Program, Stage
from quantc.verbs.prepare import check_stage, prepare, refuse_learned
from tests.support.store_files import images, small_model


@pytest.fixture
def program() -> Program:
    return qc.capture(small_model(), (images(),))


def test_the_program_itself_is_not_changed(program: Program) -> None:
    before = program.dump()
    prepared = prepare(program, "x86")
    assert prepared.stage >= Stage.ANNOTATED
    assert program.dump() == before
    assert program.plan.is_empty
    torch.testing.assert_close(prepared(images()), program(images()))  # norms are folded, nothing is rounded


def test_a_config_overrides_the_backend(program: Program) -> None:
    plain = prepare(program, "x86")
    config = qc.QuantConfig().set("conv", qc.FLOAT)
    changed = prepare(program, "x86", config=config)
    assert len(changed.plan.groups) < len(plain.plan.groups)


def test_several_backends_are_asked_in_order(program: Program) -> None:
    alone = prepare(program, "qnnpack")
    first = prepare(program, ["qnnpack", "x86"])
    assert [str(group) for group in first.plan.groups] == [str(group) for group in alone.plan.groups]


def test_for_training_it_is_in_training_mode_and_rounds(program: Program) -> None:
    trained = prepare(program, "x86", qat=True)
    assert trained.training
    assert any(parameter.requires_grad for parameter in trained.parameters())
    trained(images())
    assert not torch.equal(trained.eval()(images()), program(images()))
    assert not program.training


def test_a_model_in_training_mode_is_prepared_for_training_alone() -> None:
    program = qc.capture(nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train(), (torch.randn(2, 3),))
    with pytest.raises(ModeError, match="training mode") as caught:
        prepare(program, "x86")
    assert "qat=True" in str(caught.value.advice)
    assert prepare(program, "x86", qat=True).training
    assert program.training


def test_what_was_prepared_is_not_prepared_again(program: Program) -> None:
    prepared = prepare(program, "x86")
    for qat in (False, True):
        with pytest.raises(QuantcError, match="already prepared"):
            prepare(prepared, "x86", qat=qat)


def test_stages_are_checked_by_order(program: Program) -> None:
    check_stage(program, Stage.ANNOTATED, "prepared")
    with pytest.raises(QuantcError, match="already taken apart") as caught:
        check_stage(program, Stage.CANONICAL, "taken apart")
    assert "canonical" in str(caught.value.where)


def test_scales_that_are_learned_need_training(program: Program) -> None:
    learned = qc.QuantConfig().set_all(qc.UINT8.but(observe="lsq-plus"))
    with pytest.raises(SpecError, match="learned") as caught:
        prepare(program, "x86", config=learned)
    assert "qat=True" in str(caught.value.advice)
    prepared = prepare(program, "x86")
    assert refuse_learned(prepared) is prepared


def test_something_else_than_a_program_is_refused() -> None:
    with pytest.raises(QuantcError, match="prepare"):
        prepare(small_model(), "x86")  # type: ignore[arg-type]
