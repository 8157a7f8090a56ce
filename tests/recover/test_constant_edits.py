"""Constants that several ops read stay one where all ask for the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.ir.dialect import argument
from quantc.ir.program import Program
from quantc.recover.constant_edits import Edits, added, filled, rotated, scaled
from quantc.recover.stream import CannotRotateError, Use
from tests.support.streams import captured


class Shared(nn.Module):
    """One linear, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.linear(x).relu())
        return out


def shared() -> tuple[Program, list[Use]]:
    program = captured(Shared().double().eval(), torch.randn(2, 4, dtype=torch.float64))
    linears = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return program, [Use(node, argument(node, "w"), "w") for node in linears]


def weight(program: Program, use: Use) -> Tensor:
    found = program.tensor(_operand(use.user))
    assert found is not None
    return found.detach()


def _operand(node: fx.Node) -> fx.Node:
    found = argument(node, "w")
    assert isinstance(found, fx.Node)
    return found


def test_edits_of_all_readers_keep_the_tie_and_those_of_one_end_it() -> None:
    for uses, tied in ((2, "keep"), (1, "untie")):
        program, found = shared()
        before = weight(program, found[0]).clone()
        edits = Edits(program)
        for use in found[:uses]:
            edits.add(use, filled(2.0))
            edits.add(use, scaled(1, torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)))
        journal = edits.carry_out(tied)  # type: ignore[arg-type]
        assert weight(program, found[0])[0].tolist() == [2.0, 4.0, 6.0, 8.0]
        assert torch.equal(weight(program, found[0]), weight(program, found[1])) == (uses == 2)
        program.verify()
        journal.undo()
        program.verify()
        assert torch.equal(weight(program, found[0]), before)
        assert _operand(found[0].user) is _operand(found[1].user)


def test_a_table_is_not_untied_unasked() -> None:
    program, found = shared()
    edits = Edits(program)
    edits.add(found[0], filled(2.0))
    with pytest.raises(CannotRotateError, match="is tied: linear, linear_1"):
        edits.carry_out("keep")
    assert not bool((weight(program, found[0]) == 2.0).any())


def test_an_op_that_reads_a_constant_in_two_roles_is_refused() -> None:
    program, found = shared()
    edits = Edits(program)
    edits.add(found[0], filled(2.0))
    with pytest.raises(CannotRotateError, match="twice"):
        edits.add(Use(found[0].user, found[0].constant, "x"), filled(2.0))


def test_edits_do_what_torch_does() -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    vectors = torch.tensor([[0, 2, 4, 6], [1, 3, 5, 7]])
    turned = rotated(1, vectors, matrix).apply(x)
    torch.testing.assert_close(turned[:, ::2], x[:, ::2] @ matrix)
    torch.testing.assert_close(turned[:, 1::2], x[:, 1::2] @ matrix)
    torch.testing.assert_close(added(x[0]).apply(x[1]), x[0] + x[1])
