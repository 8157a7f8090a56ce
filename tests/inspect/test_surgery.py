"""Edits of programs on copies: arguments, second copies of a node, casts, constants; values stay what torch computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import QuantcError
from quantc.inspect import surgery
from quantc.ir.program import Program, Stage
from tests.support.by_hand import Builder

aten = torch.ops.aten


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fork() -> Program:
    """A product that two ops and the caller read; its weight is computed from constants."""
    build = Builder(w=nn.Parameter(drawn(3, 4)), s=torch.tensor([2.0]))
    x = build.input("x", drawn(2, 4, seed=1))
    weight = build.call(aten.mul.Tensor, build.const("w"), build.const("s"))
    product = build.call(aten.linear.default, x, weight)
    return build.program(build.call(aten.relu.default, product), build.call(aten.erf.default, product), product)


def same(left: Program, right: Program, *inputs: Tensor) -> None:
    for one, other in zip(left(*inputs), right(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def conv(**options: int) -> Program:
    torch.manual_seed(0)
    return qc.capture(nn.Conv2d(2, 4, 1, **options).eval(), (drawn(1, 2, 5, 5),), dynamic_shapes=None)  # type: ignore[arg-type]


def test_an_argument_is_set_wherever_it_stands() -> None:
    program = conv()
    before = program.dump()
    changed = surgery.set_arguments(program, "conv2d", {"dilation": [3, 3]})
    changed.verify()
    assert program.dump() == before
    assert torch.equal(changed(drawn(1, 2, 5, 5)), program(drawn(1, 2, 5, 5))), "one tap has no neighbours"
    softmax = qc.capture(nn.Softmax(1).eval(), (drawn(2, 3),))
    wide = surgery.set_arguments(softmax, "softmax", {"dtype": torch.float32})
    assert torch.equal(wide(drawn(2, 3)), softmax(drawn(2, 3)))


def test_arguments_that_change_the_result_or_do_not_run_are_refused() -> None:
    program = conv()
    with pytest.raises(QuantcError, match="stride") as caught:
        surgery.set_arguments(program, "conv2d", {"stride": [2, 2]})
    assert "f32[1,4,3,3]" in caught.value.what
    assert "f32[1,4,5,5]" in caught.value.what
    with pytest.raises(QuantcError, match="groups=3"):
        surgery.set_arguments(program, "conv2d", {"groups": 3})
    with pytest.raises(QuantcError, match="nothing_such"):
        surgery.set_arguments(program, "conv2d", {"nothing_such": 3})


def test_sizes_that_vary_are_checked_with_those_of_the_example() -> None:
    torch.manual_seed(0)
    sizes = ({0: torch.export.Dim("batch", max=8)},)
    program = qc.capture(nn.Conv2d(2, 4, 3, padding=1).eval(), (drawn(2, 2, 5, 5),), dynamic_shapes=sizes)
    with pytest.raises(QuantcError, match="padding"):
        surgery.set_arguments(program, "conv2d", {"padding": [0, 0]})
    surgery.set_arguments(program, "conv2d", {"padding": [1, 1]}).verify()


def test_others_read_a_copy_of_their_own() -> None:
    program = fork()
    changed = surgery.give_others_a_copy(program, "linear", ["relu"])
    changed.verify()
    linears = [node for node in changed.graph.nodes if node.target is aten.linear.default]
    assert [[user.name for user in node.users] for node in linears] == [["relu"], ["erf", "output"]]
    same(changed, program, drawn(2, 4, seed=1))
    with pytest.raises(QuantcError, match="no users other than relu"):
        surgery.give_others_a_copy(changed, "linear", ["relu"])
    with pytest.raises(QuantcError, match="not a call"):
        surgery.give_others_a_copy(program, "x", [])


def test_nodes_are_computed_in_another_type_and_cast_back() -> None:
    program = fork()
    changed = surgery.compute_in(program, ["linear", "relu"], "f64")
    changed.verify()
    types = {node.name: node.meta["val"].dtype for node in changed.graph.nodes if "val" in node.meta}
    assert (types["linear"], types["relu"], types["erf"], types["mul"]) == (
        torch.float64,
        torch.float64,
        torch.float32,
        torch.float32,
    )
    x = drawn(2, 4, seed=1)
    assert [made.dtype for made in changed(x)] == [torch.float32] * 3
    same(changed, program, x)
    casts = [node for node in changed.graph.nodes if "to.dtype" in str(node.target)]
    assert len(casts) == 4, "two operands, and two results that others read; none between the two nodes"


def test_a_type_that_a_node_has_already_changes_nothing() -> None:
    program = fork()
    assert len(list(surgery.compute_in(program, ["linear"], "f32").graph.nodes)) == len(list(program.graph.nodes))


def test_an_operand_that_is_computed_from_constants_is_stored() -> None:
    program = fork()
    changed = surgery.make_constant(program, "linear", "mul", None)
    changed.verify()
    (linear,) = [node for node in changed.graph.nodes if node.target is aten.linear.default]
    stored = changed.tensor(linear.args[1])
    assert stored is not None
    assert torch.equal(stored, drawn(3, 4) * 2)
    same(changed, program, drawn(2, 4, seed=1))


def test_an_operand_that_depends_on_an_input_needs_a_value() -> None:
    program = fork()
    with pytest.raises(QuantcError, match="relu does not read x"):
        surgery.make_constant(program, "relu", "x", None)
    with pytest.raises(QuantcError, match="depends on x") as caught:
        surgery.make_constant(program, "relu", "linear", None)
    assert "value=" in str(caught.value.advice)
    value = torch.full((2, 3), -1.0)
    changed = surgery.make_constant(program, "relu", "linear", value)
    value.zero_()
    assert torch.equal(changed(drawn(2, 4))[0], torch.zeros(2, 3))
    assert torch.equal(changed(drawn(2, 4))[1], program(drawn(2, 4))[1])


def test_a_prepared_program_becomes_one_that_is_to_be_prepared_and_a_quantized_one_is_refused() -> None:
    torch.manual_seed(0)
    x = drawn(2, 4)
    prepared = qc.prepare(qc.capture(nn.Linear(4, 3).eval(), (x,)), "x86")
    changed = surgery.compute_in(prepared, ["linear"], "f64")
    assert changed.stage < Stage.ANNOTATED
    assert changed.plan.is_empty
    assert not prepared.plan.is_empty
    qc.calibrate(prepared, [x])
    with pytest.raises(QuantcError, match="quantized already"):
        surgery.compute_in(qc.convert(prepared), ["linear"], "f64")
