"""Programs: a module rebuilt when it is needed, modes, and copies that share nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import AnnotationError, InputError, LoadError, ModeError
from quantc.ir.program import LogEntry, Program, Stage, check_has_plan, check_program
from quantc.ir.program_graph import MAX_REASONS
from quantc.ir.types import TensorType
from tests.support.programs import Builder, aten, relu_times_constant, small_net

X = torch.tensor([[-1.0, 1.0, 2.0], [3.0, -4.0, 5.0]])


# -- modes -------------------------------------------------------------------------------------------------------------


def test_only_the_first_reasons_against_training_are_kept() -> None:
    program = relu_times_constant()
    for index in range(MAX_REASONS + 3):
        program.note_inference_only(f"reason {index}")
        program.note_inference_only(f"reason {index}")
    assert program.inference_only == tuple(f"reason {index}" for index in range(MAX_REASONS))
    with pytest.raises(ModeError, match="reason 0"):
        program.train()
    assert program.eval() is program


def test_a_fixed_mode_can_be_asked_for_but_not_left() -> None:
    program = relu_times_constant()
    program.fixed_mode = "a branch on the mode"
    program.eval()
    with pytest.raises(ModeError, match="a branch on the mode") as caught:
        program.train()
    assert caught.value.advice is not None
    assert "training mode" in caught.value.advice


# -- running -----------------------------------------------------------------------------------------------------------


def test_calls_are_checked_and_arrays_are_welcome() -> None:
    program = relu_times_constant()
    assert torch.equal(program(X.numpy()), program(X))
    with pytest.raises(InputError, match="size 4"):
        program(torch.ones(2, 4))
    assert torch.equal(program.run_flat([X])[0], program(X))


def test_the_state_is_that_of_the_root_and_another_is_refused() -> None:
    program = small_net()
    state = {name: tensor.clone() for name, tensor in program.state_dict().items()}
    program.root.get_parameter("w").data.zero_()
    program.load_state_dict(state)
    assert torch.equal(program.root.get_parameter("w"), state["w"])
    assert list(program.parameters()) == [program.root.get_parameter("w")]
    with pytest.raises(LoadError, match="Net") as caught:
        program.load_state_dict({"w": state["w"]})
    assert caught.value.where is not None
    assert "canonical" in caught.value.where


def test_buffers_that_are_not_saved_stay_so_in_the_module() -> None:
    build = Builder()
    x = build.input("x", 2)
    build.root.register_buffer("passing", torch.ones(2), persistent=False)
    passing = build.graph.create_node("get_attr", "passing")
    passing.meta["val"] = TensorType(torch.float32, (2,))
    program = build.program(build.call(aten.mul.Tensor, x, passing))
    assert program.module.state_dict() == {}
    assert [name for name, _ in program.module.named_buffers()] == ["passing"]


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [Program.clone, copy.copy, copy.deepcopy], ids=["clone", "copy", "deepcopy"])
def test_a_copy_is_the_same_program_and_shares_nothing(copied: Any) -> None:
    program = small_net()
    program.log.append(LogEntry("fold", 0.001, True))
    twin = copied(program)
    text = program.dump()
    assert twin.dump() == text
    assert (twin.log, twin.stage, twin.modes[twin.node("dropout")]) == (
        program.log,
        Stage.CANONICAL,
        program.modes[program.node("dropout")],
    )
    twin.root.get_parameter("w").data.zero_()
    twin.forward(twin.node("relu"), twin.node("dropout"))
    twin.note_inference_only("folded")
    twin.log.clear()
    assert program.dump() == text
    assert len(program.log) == 1


def test_a_draft_shares_statistics_and_a_clone_does_not() -> None:
    program = relu_times_constant()
    marker: Any = ["statistics"]
    program.plan.statistics["relu:out0"] = marker
    assert program.draft().plan.statistics["relu:out0"] is marker
    assert program.clone().plan.statistics["relu:out0"] == marker
    assert program.clone().plan.statistics["relu:out0"] is not marker


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_program_names_its_graph_stage_and_capture_in_its_repr() -> None:
    assert repr(relu_times_constant()) == "<Program Net: 5 nodes, captured, by given>"


def test_a_prepared_program_without_its_plan_is_refused() -> None:
    program = relu_times_constant()
    check_has_plan(program, "convert")
    for stage in (Stage.ANNOTATED, Stage.FOLDED):
        program.stage = stage
        with pytest.raises(AnnotationError, match=r"qc\.convert"):
            check_has_plan(program, "convert")
    program.plan.left_float[program.node("mul")] = "asked for"
    check_has_plan(program, "convert")
    lowered = relu_times_constant()
    lowered.stage = Stage.LOWERED
    check_has_plan(lowered, "lower")


def test_what_is_no_program_is_refused_by_its_type() -> None:
    check_program(relu_times_constant(), "prepare", "qc.capture(model, inputs)")
    with pytest.raises(InputError, match="Linear") as caught:
        check_program(nn.Linear(1, 1), "prepare", "qc.capture(model, inputs)")
    assert caught.value.advice is not None
    assert "qc.capture(model, inputs)" in caught.value.advice
