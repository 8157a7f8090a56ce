"""Sizes that capture opened, fixed again to those of the example inputs."""

from __future__ import annotations

import torch
from torch import fx

import quantc as qc
from quantc.ir.program import Program
from quantc.ir.types import ScalarType, TensorType, type_of
from quantc.passes.fix_sizes import fix_opened, write_out
from tests.support.edge_models import module

aten = torch.ops.aten


def opened() -> Program:
    """A program whose first size is open, and which computes with it."""
    return qc.capture(module(lambda self, x: x.reshape(x.shape[0] * 2, 3))(), (torch.ones(4, 6),), method="fx")


def test_sizes_become_numbers_and_what_computed_them_goes() -> None:
    program = opened()
    assert program.signature.opened
    before = program(torch.arange(24.0).reshape(4, 6))
    (symbol,) = program.signature.opened
    assert fix_opened(program) == f"{symbol} is fixed to 4, as in the example inputs"
    assert not program.signature.opened
    assert not program.signature.ranges
    assert program.signature.inputs[0].type == TensorType(torch.float32, (4, 6))
    assert not any(isinstance(type_of(node), ScalarType) for node in program.nodes())
    (reshaped,) = [node for node in program.nodes() if node.op == "call_function"]
    assert list(reshaped.args[1]) == [8, 3]  # type: ignore[arg-type]
    assert type_of(reshaped) == TensorType(torch.float32, (8, 3))
    assert torch.equal(program(torch.arange(24.0).reshape(4, 6)), before)
    program.verify()


def test_a_program_whose_sizes_are_fixed_is_left_alone() -> None:
    program = qc.capture(module(lambda self, x: x + 1)(), (torch.ones(4, 6),), method="fx", dynamic_shapes=None)
    before = str(program)
    assert fix_opened(program) is None
    assert str(program) == before


def test_sizes_that_the_user_opened_stay_open() -> None:
    shapes = {"x": {0: torch.export.Dim("rows")}}
    program = qc.capture(module(lambda self, x: x + 1)(), (torch.ones(4, 6),), method="fx", dynamic_shapes=shapes)
    assert fix_opened(program) is None
    assert program.signature.inputs[0].type == TensorType(torch.float32, ("rows", 6))


def test_a_value_is_written_at_every_use_of_a_node() -> None:
    graph = fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    view = graph.call_function(aten.view.default, (x, [number, 2]))
    add = graph.call_function(aten.add.Tensor, (view, number), {"alpha": number})
    write_out(number, 5)
    assert view.args == (x, [5, 2])
    assert (add.args, add.kwargs) == ((view, 5), {"alpha": 5})
    assert not number.users
