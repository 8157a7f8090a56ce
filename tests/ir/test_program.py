"""Programs: changes that keep the side tables in step, a module rebuilt when it is needed, and copies that share
nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from quantc.errors import AnnotationError, InputError, LoadError, ModeError, UnknownNameError
from quantc.ir.plan import Claim
from quantc.ir.program import MAX_REASONS, LogEntry, Program, Stage, check_has_plan, check_program
from quantc.ir.sites import Origin, Site
from quantc.ir.types import TensorType
from tests.support.programs import Builder, Choice, aten, exported, small_net


def net() -> Program:
    """relu, then a product with a buffer."""
    build = Builder()
    x = build.input("x", 2, 3)
    w = build.constant("layer_w", torch.tensor([1.0, 2.0, 3.0]))
    relu = build.call(aten.relu.default, x)
    program = build.program(build.call(aten.mul.Tensor, relu, w))
    program.origins[relu] = Origin("layer.act", "torch.nn.ReLU", "model.py", 3)
    program.origins[program.node("mul")] = Origin("layer2", "M")
    return program


X = torch.tensor([[-1.0, 1.0, 2.0], [3.0, -4.0, 5.0]])


# -- reading -----------------------------------------------------------------------------------------------------------


def test_nodes_are_found_by_name_in_the_graph_their_path_names() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    inner = program.node("false_graph_0/sub")
    assert inner.target is aten.sub.Tensor
    assert program.has_node("false_graph_0/sub")
    assert not program.has_node("sub")
    assert program.site(inner, operand=1) == Site("false_graph_0", "sub", operand=1)
    assert program.site(program.node("linear")) == Site("", "linear", out=0)
    with pytest.raises(UnknownNameError, match="lineer") as caught:
        program.node("lineer")
    assert caught.value.advice is not None
    assert "linear" in caught.value.advice


def test_nodes_of_a_module_are_those_at_its_path_and_below() -> None:
    program = net()
    assert [node.name for node in program.module_nodes("layer")] == ["relu"]
    assert [node.name for node in program.module_nodes("layer.act")] == ["relu"]
    assert program.module_nodes("lay") == []


def test_constants_and_origins_of_nodes() -> None:
    program = net()
    held = program.tensor(program.node("layer_w"))
    assert held is not None
    assert held.tolist() == [1.0, 2.0, 3.0]
    assert program.tensor(program.node("relu")) is None
    assert program.describe(program.node("relu")) == "relu (layer.act : ReLU @ model.py:3)"
    assert program.describe(program.node("x")) == "x"


def test_opaque_nodes_are_those_without_a_canonical_form() -> None:
    program = net()
    assert program.opaque() == []
    node = program.emit(torch.sigmoid, (program.node("relu"),), before=program.node("mul"))
    assert program.opaque() == [node]


# -- changing ----------------------------------------------------------------------------------------------------------


def test_an_emitted_call_has_the_origin_of_its_place_or_of_what_it_is_like() -> None:
    program = net()
    relu, mul = program.node("relu"), program.node("mul")
    near = program.emit(aten.neg.default, (relu,), before=mul)
    like = program.emit(aten.neg.default, (relu,), before=mul, like=relu)
    assert program.origins[near] == program.origins[mul]
    assert program.origins[like] == program.origins[relu]
    assert ("val" in near.meta, like.meta["val"] is relu.meta["val"]) == (False, True)
    assert (near.name, like.name) == ("neg", "neg_1")
    assert [node.name for node in program.graph.nodes][-4:] == ["neg", "neg_1", "mul", "output"]
    typed = program.emit(aten.neg.default, (relu,), before=mul, like=relu, value=TensorType(torch.int8, ()))
    assert str(typed.meta["val"]) == "i8[]"


def test_the_module_is_rebuilt_after_a_change_and_only_then() -> None:
    program = net()
    assert program(X).tolist() == [[0.0, 2.0, 6.0], [3.0, 0.0, 15.0]]
    module = program.module
    assert program.module is module
    relu = program.node("relu")
    program.replace(relu, program.emit(aten.abs.default, relu.args, before=relu, like=relu))
    assert program.module is not module
    assert program(X).tolist() == [[1.0, 2.0, 6.0], [3.0, 8.0, 15.0]]


def test_rows_follow_a_replacement_and_vanish_with_an_erased_node() -> None:
    program = net()
    relu, mul = program.node("relu"), program.node("mul")
    program.plan.claims[relu] = Claim("q", "r", "relu")
    new = program.emit(aten.abs.default, relu.args, before=relu)
    program.replace(relu, new)
    assert program.plan.claims[new].rule == "r"
    assert program.origins[new].module_path == "layer.act"
    assert relu not in program.plan.claims
    program.forward(mul, new)
    assert mul not in program.origins
    assert program.graph.output_node().args == ((new,),)


def test_constants_get_names_of_their_own() -> None:
    program = net()
    mul = program.node("mul")
    made = [program.constant("deep.er.w", torch.full((3,), float(index)), before=mul) for index in range(3)]
    assert [node.target for node in made] == ["deep.er.w", "deep.er.w_1", "deep.er.w_2"]
    assert [str(node.meta["val"]) for node in made] == ["f32[3]"] * 3
    trained = program.constant("v", nn.Parameter(torch.ones(3)), before=mul)
    assert [name for name, _ in program.named_parameters()] == ["v"]
    mul.args = (mul.args[0], trained)
    program.touch()
    assert torch.equal(program(X), X.relu())


def test_nested_graphs_are_stored_under_names_of_their_own() -> None:
    program = net()
    mul = program.node("mul")
    graphs = [fx.Graph() for _ in range(2)]
    for graph in graphs:
        graph.output((graph.placeholder("x"),))
    made = [program.subgraph("body", graph, before=mul) for graph in graphs]
    assert [node.target for node in made] == ["body", "body_1"]
    assert dict(program.graphs()) == {"": program.graph, "body": graphs[0], "body_1": graphs[1]}
    program.verify()


def test_only_the_first_reasons_against_training_are_kept() -> None:
    program = net()
    for index in range(MAX_REASONS + 3):
        program.note_inference_only(f"reason {index}")
        program.note_inference_only(f"reason {index}")
    assert program.inference_only == tuple(f"reason {index}" for index in range(MAX_REASONS))
    with pytest.raises(ModeError, match="reason 0"):
        program.train()
    assert program.eval() is program


def test_a_fixed_mode_can_be_asked_for_but_not_left() -> None:
    program = net()
    program.fixed_mode = "a branch on the mode"
    program.eval()
    with pytest.raises(ModeError, match="a branch on the mode") as caught:
        program.train()
    assert caught.value.advice is not None
    assert "training mode" in caught.value.advice


# -- running -----------------------------------------------------------------------------------------------------------


def test_calls_are_checked_and_arrays_are_welcome() -> None:
    program = net()
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
    program = net()
    marker: Any = ["statistics"]
    program.plan.statistics["relu:out0"] = marker
    assert program.draft().plan.statistics["relu:out0"] is marker
    assert program.clone().plan.statistics["relu:out0"] == marker
    assert program.clone().plan.statistics["relu:out0"] is not marker


# -- messages ----------------------------------------------------------------------------------------------------------


def test_log_entries_read_with_their_notes() -> None:
    assert str(LogEntry("fold", 0.0015, True, ("two norms",))) == "fold: changed, 1.5 ms\n  two norms"
    assert str(LogEntry("fold", 0.0, False)) == "fold: no change, 0.0 ms"
    assert repr(net()) == "<Program Net: 5 nodes, captured, by given>"


def test_a_prepared_program_without_its_plan_is_refused() -> None:
    program = net()
    check_has_plan(program, "convert")
    for stage in (Stage.ANNOTATED, Stage.FOLDED):
        program.stage = stage
        with pytest.raises(AnnotationError, match=r"qc\.convert"):
            check_has_plan(program, "convert")
    program.plan.left_float[program.node("mul")] = "asked for"
    check_has_plan(program, "convert")
    lowered = net()
    lowered.stage = Stage.LOWERED
    check_has_plan(lowered, "lower")


def test_what_is_no_program_is_refused_by_its_type() -> None:
    check_program(net(), "prepare", "qc.capture(model, inputs)")
    with pytest.raises(InputError, match="Linear") as caught:
        check_program(nn.Linear(1, 1), "prepare", "qc.capture(model, inputs)")
    assert caught.value.advice is not None
    assert "qc.capture(model, inputs)" in caught.value.advice
