"""The verifier: one test for each rule, several faults at once, and growth."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from quantc.errors import VerifyError
from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.ir.sites import ModeValue, Origin
from quantc.ir.types import TensorType
from quantc.text.printer import node_line
from quantc.verify.verify import verify
from tests.support.growth import calls, exponent
from tests.support.programs import Builder, Choice, aten, chain, exported, small_net


def faults_of(program: Program) -> tuple[str, ...]:
    with pytest.raises(VerifyError) as caught:
        verify(program)
    return caught.value.faults


def only_fault(program: Program) -> str:
    (fault,) = faults_of(program)
    return fault


def two_inputs() -> tuple[Builder, fx.Node, fx.Node]:
    build = Builder()
    return build, build.input("x", 2, 4), build.input("y", 2, 4)


@pytest.mark.parametrize(
    "make", [small_net, lambda: exported(Choice(), [torch.ones(2, 4)]), lambda: chain(50)], ids=["net", "cond", "chain"]
)
def test_sound_programs(make: Callable[[], Program]) -> None:
    verify(make())


# -- order and identity ------------------------------------------------------------------------------------------------


def test_use_before_definition() -> None:
    build, x, y = two_inputs()
    first = build.call(aten.relu.default, x)
    second = build.call(aten.add.Tensor, x, y)
    program = build.program(second)
    first.args = (second,)
    assert only_fault(program) == f"{node_line(program, first)}\n      it uses %add before it is defined"


def test_node_of_another_graph() -> None:
    program, other = small_net(), small_net()
    program.node("relu").args = (other.node("dropout"),)
    assert "it uses %dropout, which belongs to another graph" in only_fault(program)


def test_erased_node() -> None:
    program = small_net()
    relu = program.node("relu")
    (output,) = program.graph.find_nodes(op="output")
    output.args = ((program.node("dropout"),),)
    program.graph.erase_node(relu)
    output.args = ((relu,),)
    assert "it uses %relu, which has been erased" in only_fault(program)


def test_duplicate_names() -> None:
    program = small_net()
    program.node("relu").name = "dropout"
    assert "another node of this graph is also named 'dropout'" in only_fault(program)


def test_the_same_name_in_two_graphs_is_fine() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    names = [node.name for node in program.nodes()]
    assert len(names) > len(set(names))
    verify(program)


def test_missing_output() -> None:
    program = small_net()
    program.graph.erase_node(next(iter(program.graph.find_nodes(op="output"))))
    assert only_fault(program) == "the graph has no output"


def test_second_output_and_nodes_after_it() -> None:
    program = small_net()
    relu = program.node("relu")
    program.graph.output((relu,))
    late = program.graph.call_function(aten.relu.default, (relu,))
    faults = faults_of(program)
    assert any("a graph has one output" in fault for fault in faults)
    assert any(late.name in fault and "comes after the output" in fault for fault in faults)
    assert len(faults) == 2


def test_input_after_computation() -> None:
    program = small_net()
    program.node("relu").append(program.node("x"))
    faults = faults_of(program)
    assert any("inputs come before all computation" in fault for fault in faults)
    assert any("it uses %x before it is defined" in fault for fault in faults)


# -- targets -----------------------------------------------------------------------------------------------------------


def test_missing_constant() -> None:
    program = small_net()
    del program.root._buffers["mean"]
    assert "there is no parameter, buffer or graph 'mean'" in only_fault(program)


def test_missing_module() -> None:
    build, x, _ = two_inputs()
    program = build.program(build.graph.create_node("call_module", "lost.act", (x,)))
    assert "unknown module 'lost.act'" in only_fault(program)


def test_call_method_in_a_canonical_program() -> None:
    build, x, _ = two_inputs()
    program = build.program(build.graph.create_node("call_method", "relu", (x,)))
    verify(program)
    program.stage = Stage.CANONICAL
    assert "call_method 'relu' in a canonical program" in only_fault(program)


# -- the signature -----------------------------------------------------------------------------------------------------


def test_inputs_that_the_signature_does_not_have() -> None:
    program = small_net()
    program.signature = Signature((), pytree.tree_structure(((), {})), program.signature.out_spec)
    assert only_fault(program) == "the signature has 0 inputs, but the graph 1"


def test_input_of_another_type() -> None:
    program = small_net()
    old = program.signature
    program.signature = Signature((Input("x", TensorType(torch.float16, (1,))),), old.in_spec, old.out_spec)
    assert "the signature says that input 'x' is f16[1]" in only_fault(program)


def test_specs_of_another_size() -> None:
    program = small_net()
    inputs = program.signature.inputs
    program.signature = Signature(inputs, pytree.tree_structure(((0, 0), {})), pytree.tree_structure((0, 0)))
    faults = faults_of(program)
    assert faults[0] == "in_spec arranges 2 inputs, not 1"
    assert "out_spec arranges 2 outputs, not 1" in faults[1]


def test_output_that_is_not_flat() -> None:
    program = small_net()
    (output,) = program.graph.find_nodes(op="output")
    output.args = (program.node("relu"),)
    assert "a flat tuple of outputs" in only_fault(program)


# -- schemas -----------------------------------------------------------------------------------------------------------


def test_a_call_that_does_not_fit_its_schema_is_quoted_with_the_reason() -> None:
    build, x, _ = two_inputs()
    made = build.graph.create_node("call_function", aten.relu.default, (x, 1))
    program = build.program(made)
    line, _, what = only_fault(program).partition("\n      ")
    assert line == node_line(program, made)
    assert what == "relu takes 1 arguments by position, not 2"


# -- several outputs, nested graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "is_sound"), [(0, True), (1, True), (-2, True), (2, False), (-3, False)])
def test_getitem_within_a_known_tuple(index: int, is_sound: bool) -> None:
    build, x, _ = two_inputs()
    pair = build.call(aten.split.Tensor, x, 1)
    program = build.program(build.graph.call_function(operator.getitem, (pair, index)))
    if is_sound:
        verify(program)
    else:
        assert f"item {index} of (f32[1,4], f32[1,4]), which has 2" in only_fault(program)


def test_cond_with_the_wrong_number_of_operands() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    cond = program.node("cond")
    operands = cond.args[3]
    assert isinstance(operands, tuple)
    cond.args = (*cond.args[:3], operands[:1])
    faults = faults_of(program)
    assert "@true_graph_0 takes 2 inputs, but is given 1" in faults[0]
    assert "@false_graph_0 takes 2 inputs, but is given 1" in faults[1]


def test_branches_that_disagree() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    branch = program.root.get_submodule("false_graph_0")
    assert isinstance(branch, fx.GraphModule)
    (output,) = branch.graph.find_nodes(op="output")
    output.args = ((*output.all_input_nodes, *output.all_input_nodes),)
    assert "as many outputs: @true_graph_0 gives 1, @false_graph_0 gives 2" in only_fault(program)


def test_cond_without_graphs() -> None:
    build, x, y = two_inputs()
    node = build.graph.call_function(torch.ops.higher_order.cond, (x, y, y, (x,)))
    faults = faults_of(build.program(node))
    assert [fault.rpartition("\n")[2].strip() for fault in faults] == [
        "argument 1 of cond must be a nested graph",
        "argument 2 of cond must be a nested graph",
    ]


def test_faults_in_nested_graphs_name_the_graph() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    node = program.node("false_graph_0/sub")
    node.args = (*node.args, 3)
    assert only_fault(program).startswith("graph @false_graph_0: %sub : f32[2,4] = sub(")


# -- side tables -------------------------------------------------------------------------------------------------------


def test_rows_whose_nodes_are_gone() -> None:
    program = small_net()
    relu, dropout = program.node("relu"), program.node("dropout")
    program.origins[relu] = Origin("last")
    relu.replace_all_uses_with(dropout)
    program.graph.erase_node(relu)  # not through Program.erase
    program.modes[relu] = ModeValue(0, True, False)
    program.counters[relu] = "count"
    assert faults_of(program) == tuple(
        f"{table} has a row for 'relu', which is not in the program" for table in ("origins", "modes", "counters")
    )


def test_rows_that_do_not_fit_their_nodes() -> None:
    program = small_net()
    program.modes[program.node("relu")] = ModeValue(4, True, False)
    program.counters[program.node("batch_norm")] = "lost"
    assert faults_of(program) == (
        "modes says that argument 4 of 'relu' has a mode, but it has 1",
        "counters names 'lost' for 'batch_norm', but there is no such buffer",
    )


# -- all at once, and growth -------------------------------------------------------------------------------------------


def test_all_faults_are_reported_at_once() -> None:
    program = small_net()
    program.stage = Stage.FUSED
    relu = program.node("relu")
    with program.graph.inserting_before(relu):
        program.graph.create_node("get_attr", "nowhere")
        program.graph.create_node("call_method", "view", (relu,))
    relu.args = (relu.args[0], 7)
    program.origins[small_net().node("x")] = Origin("elsewhere")
    faults = faults_of(program)
    assert len(faults) == 5
    with pytest.raises(VerifyError, match="Net breaks 5 rules of the IR") as caught:
        program.verify()
    assert all(fault in str(caught.value) for fault in faults)


def test_cost_grows_linearly() -> None:
    verify(chain(10))
    costs = {length: calls(partial(verify, chain(length))) for length in (250, 2000)}
    assert exponent(costs) < 1.05
