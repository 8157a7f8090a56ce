"""sink-constants: nested graphs read constants themselves, unless they are written to or differ between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import fx, nn

from quantc.errors import ModeError
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.sink_constants import SinkConstants
from quantc.pipeline.pipeline import Pipeline
from tests.support.text_programs import inputs_of, program_of

COND = """program "Branches" stage=canonical method=export mode=eval
  input %p : b1[]
  input %x : f32[2,3]
  const %w = "layer.weight" : f32[3,3] param
  const %v = "layer.other" : f32[3,3] buffer
  %cond : (f32[2,3]) = higher_order.cond(%p, @yes, @no, (%x, %w, %v))
  %getitem : f32[2,3] = operator:getitem(%cond, 0)
  output (%getitem,)
graph @yes
  input %x : f32[2,3]
  input %w : f32[3,3]
  input %v : f32[3,3]
  %linear : f32[2,3] = linear(%x, %w)
  output (%linear,)
graph @no
  input %x : f32[2,3]
  input %w : f32[3,3]
  input %v : f32[3,3]
  %linear : f32[2,3] = linear(%x, %v)
  output (%linear,)
"""
TWICE = COND.replace(
    "  output (%getitem,)\ngraph @yes",
    """  const %u = "layer.third" : f32[3,3] buffer
  %again : (f32[2,3]) = higher_order.cond(%p, @yes, @no, (%getitem, %u, %v))
  %item : f32[2,3] = operator:getitem(%again, 0)
  output (%item,)
graph @yes""",
)


def sunk(text: str, purpose: str = "inference") -> Program:
    pass_ = SinkConstants.model_validate({"purpose": purpose})
    return Pipeline((pass_,)).run(program_of(text), [Truth(), Verify(), Guard()])


def reads(program: Program, path: str) -> list[str]:
    graph = dict(program.graphs())[path]
    return [str(node.target) for node in graph.find_nodes(op="get_attr")]


def operands(program: Program, call: str) -> list[str]:
    return [node.name for node in cast(Sequence[fx.Node], program.node(call).args[3])]


def test_each_branch_reads_what_it_uses_and_is_given_no_more() -> None:
    program = sunk(COND)
    assert reads(program, "yes") == ["layer.weight"]
    assert reads(program, "no") == ["layer.other"]
    assert operands(program, "cond") == ["x"]
    assert program.log[-1].notes == ("1 constants moved into yes", "1 constants moved into no")


@pytest.mark.parametrize("side", [True, False])
def test_no_bit_changes_in_either_branch(side: bool) -> None:
    before, after = program_of(COND), sunk(COND)
    _, x = inputs_of(before)
    taken = torch.tensor(side)
    assert torch.equal(before(taken, x), after(taken, x))


def test_nothing_is_copied() -> None:
    program = program_of(COND)
    weight = program.tensor(program.node("w"))
    SinkConstants().run(program)
    inner = dict(program.graphs())["yes"].find_nodes(op="get_attr")[0]
    assert program.tensor(inner) is weight
    assert isinstance(weight, nn.Parameter)


def test_an_op_is_named_after_the_module_whose_constants_it_reads() -> None:
    program = sunk(COND)
    (linear,) = [node for node in dict(program.graphs())["yes"].nodes if node.op == "call_function"]
    assert program.origins[linear].module_path == "layer"


def test_one_graph_that_is_called_with_different_tensors_keeps_those_operands() -> None:
    program = sunk(TWICE)
    assert operands(program, "cond") == ["x", "w"]
    assert operands(program, "again") == ["getitem", "u"]
    assert reads(program, "no") == ["layer.other"], "both calls are given the same one here"
    notes = program.log[-1].notes
    assert any("layer.weight stays an operand: other calls of yes" in note for note in notes)
    assert any("layer.third stays an operand" in note for note in notes)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_constant_that_is_written_to_stays_an_operand(where: str) -> None:
    line = "  %write : f32[3,3] = aten.add_.Tensor(%v, 1)\n"
    mark = "  %cond :" if where == "outside" else "  %linear : f32[2,3] = linear(%x, %v)"
    program = sunk(COND.replace(mark, line + mark))
    assert operands(program, "cond") == ["x", "v"]
    assert reads(program, "yes") == ["layer.weight"], "only what is written to stays"
    stayed = [note for note in program.log[-1].notes if "stays" in note]
    assert stayed == ["layer.other stays an operand: the program writes to it"]
    assert reads(program, "no") == []


def test_a_write_to_what_a_call_may_return_keeps_all_that_it_may_be() -> None:
    """A branch that returns its operand, whose result is written to."""
    text = COND.replace(
        "  output (%getitem,)", "  %write : f32[2,3] = aten.add_.Tensor(%getitem, 1)\n  output (%write,)", 1
    )
    program = sunk(text)
    assert operands(program, "cond") == ["x", "w", "v"]


def test_a_program_in_training_mode_is_left_alone_with_the_reason() -> None:
    program = program_of(COND.replace("mode=eval", "mode=train"))
    before = program.dump("text")
    outcome = SinkConstants().run(program)
    assert not outcome.changed
    assert "training" in outcome.notes[0]
    assert program.dump("text") == before


def test_gradients_that_are_lost_close_the_way_to_training() -> None:
    with pytest.raises(ModeError, match="nested graphs"):
        sunk(COND).train()
    assert not sunk(COND, purpose="training").inference_only
    assert not sunk(COND.replace("param", "buffer")).inference_only, "buffers take no gradient"


def test_a_program_without_nested_graphs_is_left_alone() -> None:
    text = """program "Flat" stage=canonical method=export mode=train
  input %x : f32[2,3]
  const %w = "w" : f32[3,3] param
  %linear : f32[2,3] = linear(%x, %w)
  output (%linear,)
"""
    outcome = SinkConstants().run(program_of(text))
    assert not outcome.changed
    assert outcome.notes == ()
