"""Calls with the types of their results: what the builder says is what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from quantc.errors import QuantcError
from quantc.ir.program import Program
from quantc.ir.sites import Origin
from quantc.ir.types import TensorType, type_of, type_of_value
from quantc.rewrite.builder import Calls, broadcast, known_type, times
from tests.support.programs import Builder, aten


def program_of(*shapes: tuple[int | str, ...]) -> tuple[Program, list[fx.Node], Calls]:
    build = Builder()
    nodes = []
    for index, shape in enumerate(shapes):
        nodes.append(build.graph.placeholder(f"x{index}"))
        nodes[-1].meta["val"] = TensorType(torch.float32, shape)
    program = build.program(*nodes)
    return program, nodes, Calls(program, program.graph.output_node())


STEPS: dict[str, tuple[list[tuple[int, ...]], Callable[..., fx.Node]]] = {
    "matmul": ([(2, 1, 3, 4), (5, 4, 6)], lambda calls, x, y: calls.matmul(x, y)),
    "matmul with a vector": ([(2, 3, 4), (4,)], lambda calls, x, y: calls.matmul(x, y)),
    "linear": ([(2, 3, 4), (6, 4)], lambda calls, x, w: calls.linear(x, w)),
    "transpose": ([(2, 3, 4)], lambda calls, x: calls.transpose(x)),
    "permute": ([(2, 3, 4)], lambda calls, x: calls.permute(x, [2, 0, 1])),
    "permute of the last two": ([(2, 3, 4)], lambda calls, x: calls.permute(x, [0, 2, 1])),
    "merge": ([(2, 3, 4, 5)], lambda calls, x: calls.merge(x, 1, 2)),
    "merge of none": ([(2, 3)], lambda calls, x: calls.merge(x, 1, 0)),
    "part": ([(2, 12, 5)], lambda calls, x: calls.part(x, 1, [3, 4], (3, 4))),
    "part into none": ([(2, 1, 5)], lambda calls, x: calls.part(x, 1, [], ())),
    "elementwise": ([(2, 1, 4), (3, 1)], lambda calls, x, y: calls.elementwise("add", x, y)),
    "elementwise with a number": ([(2, 3)], lambda calls, x: calls.elementwise(aten.mul.Tensor, x, 2.0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_type_of_a_call_is_that_of_what_torch_computes(name: str) -> None:
    shapes, make = STEPS[name]
    program, nodes, calls = program_of(*shapes)
    made = make(calls, *nodes)
    values = dict(zip(nodes, (torch.randn(shape) for shape in shapes), strict=True))
    args: Any = fx.map_arg(made.args, values.__getitem__)
    target: Any = made.target
    assert type_of(made) == type_of_value(target(*args))
    assert made.next is program.graph.output_node()


def test_what_changes_nothing_is_no_call() -> None:
    program, (x,), calls = program_of((2, 3, 4))
    assert calls.permute(x, [0, 1, 2]) is x
    assert calls.merge(x, 1, 1) is x
    assert calls.part(x, 1, [3], (3,)) is x
    assert program.graph.find_nodes(op="call_function", target=aten.permute.default) == []


def test_sizes_are_numbers_or_read_at_run_time() -> None:
    _, (x,), calls = program_of((2, "s0"))
    assert calls.size(x, 0) == 2
    read = calls.size(x, -1)
    assert isinstance(read, fx.Node)
    assert (read.target, read.args) == (aten.sym_size.int, (x, 1))
    assert str(type_of(read)) == "int(s0)"


def test_calls_have_the_origin_of_the_node_they_come_before() -> None:
    program, (x,), _ = program_of((2, 3))
    relu = program.emit(aten.relu.default, (x,), before=program.graph.output_node())
    program.origins[relu] = Origin("act")
    assert program.origins[Calls(program, relu).transpose(x)] == Origin("act")


@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [
        ((2, 1, 4), (3, 1), (2, 3, 4)),
        ((), (5,), (5,)),
        (("s0", 4), (1, 1), ("s0", 4)),
        (("s0",), (4,), (4,)),
        ((4,), ("s0",), (4,)),
        ((0,), (1,), (0,)),
        (("s0",), ("s0",), ("s0",)),
    ],
)
def test_shapes_are_broadcast_as_torch_does(left: Any, right: Any, shape: Any) -> None:
    assert broadcast(left, right) == shape
    if all(isinstance(size, int) for size in (*left, *right)):
        assert (torch.empty(left) + torch.empty(right)).shape == torch.Size(shape)


def test_products_of_sizes_are_numbers_or_expressions() -> None:
    assert times([2, 3]) == 6
    assert times([]) == 1
    assert times(["s0"]) == "s0"
    assert times([2, "s0", 3, "s1 + 1"]) == "6*s0*(s1 + 1)"


def test_a_tensor_of_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(QuantcError, match="lost"):
        known_type(fx.Graph().placeholder("lost"))
