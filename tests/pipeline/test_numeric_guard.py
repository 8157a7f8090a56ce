"""The numeric guard: it catches passes that change numbers, and disturbs nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from quantc.errors import GuardError
from quantc.ir.program import Program
from quantc.ir.sites import Origin
from quantc.pipeline.numeric_guard import Guard
from quantc.pipeline.pipeline import Pass, Pipeline, Preserves
from quantc.pipeline.tolerance import Tolerance
from tests.support.by_hand import Builder, aten, two_layers

EXACTLY, CLOSELY = Preserves.EXACTLY, Preserves.CLOSELY


class Idle(Pass):
    """Changes nothing."""

    name: ClassVar[str] = "idle"

    def run(self, program: Program) -> bool:
        return False


class Scale(Pass):
    """Multiplies the second weight."""

    name: ClassVar[str] = "scale"

    factor: float = 1.0

    def run(self, program: Program) -> bool:
        node = program.node("w2")
        tensor = program.tensor(node)
        if tensor is None:
            return False
        scaled = nn.Parameter(tensor.detach() * self.factor)
        program.replace(node, program.constant("scaled", scaled, before=node))
        return True


class ScaleClosely(Scale):
    name: ClassVar[str] = "scale-closely"
    preserves: ClassVar[Preserves] = Preserves.CLOSELY


class ScaleFreely(Scale):
    name: ClassVar[str] = "scale-freely"
    preserves: ClassVar[Preserves] = Preserves.NOTHING


class Retarget(Pass):
    """Makes another op of a node, in place."""

    name: ClassVar[str] = "retarget"

    node: str
    says: bool = True

    def run(self, program: Program) -> bool:
        program.node(self.node).target = aten.neg.default
        program.touch()
        return self.says


class Erase(Pass):
    """Drops nodes nobody uses, whatever they do."""

    name: ClassVar[str] = "erase"

    node: str

    def run(self, program: Program) -> bool:
        program.erase(program.node(self.node))
        return True


def guarded(program: Program, *passes: Pass, **options: Any) -> Guard:
    guard = Guard(**options)
    Pipeline(passes).run(program, [guard])
    return guard


def test_a_pass_that_keeps_the_numbers_is_let_through() -> None:
    assert guarded(two_layers(), Idle(), Scale(factor=1.0)).checked == ["idle", "scale"]


@pytest.mark.parametrize("says", [True, False])
def test_a_wrong_pass_is_caught_with_the_first_node_that_differs(says: bool) -> None:
    program = two_layers()
    program.origins[program.node("relu")] = Origin("block.act", "torch.nn.ReLU", "model.py", 12)
    expected = program.clone()
    Retarget(node="relu").run(expected)
    size = (program(*program.example_inputs or ()) - expected(*program.example_inputs or ())).abs().max().detach()
    with pytest.raises(GuardError, match="pass retarget changed the numbers: output 0 differs by") as caught:
        guarded(program, Idle(), Retarget(node="relu", says=says))
    assert f"{float(size):.6g}" in caught.value.what
    assert "the first node that differs is relu (block.act : ReLU @ model.py:12)" in str(caught.value.where)
    assert "pass 2 of 2" in str(caught.value.where)
    assert "ran before it: idle" in str(caught.value.where)


def test_the_first_node_is_named_though_the_faulty_one_is_new() -> None:
    with pytest.raises(GuardError) as caught:
        guarded(two_layers(), Scale(factor=2.0))
    assert "the first node that differs is linear_1" in str(caught.value.where)


def test_rounding_is_forgiven_to_passes_that_declare_it() -> None:
    nearly = 1 + 2e-6
    with pytest.raises(GuardError, match="allowed: 0"):
        guarded(two_layers(), Scale(factor=nearly))
    assert guarded(two_layers(), ScaleClosely(factor=nearly)).checked
    with pytest.raises(GuardError):
        guarded(two_layers(), ScaleClosely(factor=1.01))
    assert guarded(two_layers(), ScaleClosely(factor=1.01), tolerance=Tolerance(relative=0.1)).checked
    with pytest.raises(GuardError):
        guarded(two_layers(), ScaleClosely(factor=nearly), tolerance=Tolerance(relative=0.0, absolute=0.0))


def test_a_pass_that_means_to_change_numbers_is_not_watched() -> None:
    guard = guarded(two_layers(), ScaleFreely(factor=3.0))
    assert (guard.checked, guard.skipped) == ([], [])


def test_a_program_that_no_longer_runs_is_told_with_its_node() -> None:
    class Shrink(Pass):
        """Swaps a weight for one of another shape."""

        name: ClassVar[str] = "shrink"

        def run(self, program: Program) -> bool:
            node = program.node("w2")
            program.replace(node, program.constant("small", torch.ones(2, 2), before=node))
            return True

    with pytest.raises(GuardError, match="does not run on its example inputs after shrink, though it did") as caught:
        guarded(two_layers(), Shrink())
    assert "node linear_1" in str(caught.value.where)


def test_example_inputs_that_do_not_fit_are_not_blamed_on_the_pass() -> None:
    program = two_layers()
    program.example_inputs = (torch.ones(2, 5),)
    with pytest.raises(GuardError, match="does not run on its example inputs before idle ran"):
        guarded(program, Idle())


def test_what_cannot_be_checked_is_said() -> None:
    program = two_layers()
    assert guarded(program, Idle(), limit=3).skipped == [
        f"idle: the program has {len(program.graph.nodes)} nodes, more than 3; ask for it with Guard(limit=None)"
    ]
    assert guarded(program, Idle(), limit=None).skipped == []
    program.root.to("meta")
    assert "constants are on the meta device" in guarded(program, Idle()).skipped[0]
    program.example_inputs = None
    assert "no example inputs" in guarded(program, Idle()).skipped[0]


# -- state and randomness -------------------------------------------------------------------------------------


def training_program() -> Program:
    """Batch norm that updates its statistics, dropout that drops, a counter that counts."""
    build = Builder(mean=torch.zeros(3), var=torch.ones(3), count=torch.zeros(()))
    x = build.input("x", torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    mean, var, count = build.const("mean"), build.const("var"), build.const("count")
    build.call(aten.add_.Tensor, count, 1)
    norm = build.call(aten.batch_norm.default, x, None, None, mean, var, True, 0.1, 1e-5, False)
    return build.program(build.call(aten.dropout.default, norm, 0.5, True))


def test_buffers_generator_and_inputs_are_left_as_they_were() -> None:
    program = training_program()
    before = {name: tensor.clone() for name, tensor in program.root.named_buffers()}
    examples = [leaf.clone() for leaf in program.example_inputs or ()]
    state = torch.get_rng_state()
    assert guarded(program, Idle()).checked == ["idle"], "dropout draws the same numbers both times"
    assert torch.get_rng_state().equal(state)
    for name, tensor in program.root.named_buffers():
        assert tensor.equal(before[name])
    for leaf, example in zip(program.example_inputs or (), examples, strict=True):
        assert leaf.equal(example)


def test_parameters_written_in_place_are_restored() -> None:
    build = Builder(w=nn.Parameter(torch.ones(2)))
    x = build.input("x", torch.ones(2))
    build.call(aten.mul_.Tensor, build.const("w"), 3.0)
    program = build.program(build.call(aten.relu.default, x))
    assert guarded(program, Idle()).checked
    assert program.root.get_parameter("w").equal(torch.ones(2))
    with pytest.raises(GuardError, match="what is written to w"):
        guarded(program, Erase(node="mul_"))


def test_a_write_that_is_lost_is_a_change_of_numbers() -> None:
    with pytest.raises(GuardError, match="what is written to count"):
        guarded(training_program(), Erase(node="add_"))


def test_a_write_to_an_input_that_is_lost_is_a_change_of_numbers() -> None:
    build = Builder()
    x = build.input("x", torch.ones(2))
    build.call(aten.add_.Tensor, x, 1)
    y = build.input("y", torch.ones(2))
    program = build.program(build.call(aten.relu.default, y))
    assert guarded(program, Idle()).checked
    with pytest.raises(GuardError, match="what is written to input 0"):
        guarded(program, Erase(node="add_"))


def test_a_lost_random_draw_is_noticed() -> None:
    build = Builder()
    x = build.input("x", torch.ones(8))
    build.call(aten.bernoulli.default, x)
    program = build.program(build.call(aten.dropout.default, x, 0.5, True))
    with pytest.raises(GuardError, match="output 0 differs by 2"):
        guarded(program, Erase(node="bernoulli"))


def test_gradients_are_not_recorded() -> None:
    guard = Guard()
    program = two_layers()
    Pipeline((Idle(),)).run(program, [guard])
    assert program.root.get_parameter("w1").grad is None
    assert torch.is_grad_enabled()
