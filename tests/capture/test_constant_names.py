"""Names of tensor literals: const_0, const_1 and so on in order of use, whatever the capture called them."""

from __future__ import annotations

import torch
from torch import fx

from quantc.capture.constant_names import name_literals
from quantc.ir.program import Program
from tests.support.programs import Builder, aten


def summed(*names: str) -> tuple[Program, dict[str, float]]:
    """A program that adds these constants, in this order, and the value of each."""
    build = Builder()
    total = build.input("x", 1)
    values = {name: float(place + 1) for place, name in enumerate(dict.fromkeys(names))}
    for name in names:
        node = build.graph.create_node("get_attr", name)
        build.root.register_buffer(name, torch.tensor([values[name]]))
        node.meta["val"] = torch.empty(1, device="meta")
        total = build.call(aten.add.Tensor, total, node)
    return build.program(total), values


def read(program: Program) -> list[tuple[str, float]]:
    found = [node for node in program.nodes() if node.op == "get_attr"]
    return [(str(node.target), float(tensor)) for node in found if (tensor := program.tensor(node)) is not None]


def test_literals_are_numbered_in_order_of_use() -> None:
    program, _ = summed("lifted_tensor_7", "_tensor_constant0", "scale")
    name_literals(program)
    assert read(program) == [("const_0", 1.0), ("const_1", 2.0), ("scale", 3.0)]
    assert sorted(program.root._buffers) == ["const_0", "const_1", "scale"]


def test_one_that_is_read_twice_has_one_name() -> None:
    program, _ = summed("_tensor_constant3", "_tensor_constant1", "_tensor_constant3")
    name_literals(program)
    assert read(program) == [("const_0", 1.0), ("const_1", 2.0), ("const_0", 1.0)]


def test_names_that_are_right_in_another_order_are_not_mixed_up() -> None:
    program, _ = summed("const_1", "const_0")
    name_literals(program)
    assert read(program) == [("const_0", 1.0), ("const_1", 2.0)]
    name_literals(program)
    assert read(program) == [("const_0", 1.0), ("const_1", 2.0)]


def test_literals_that_nothing_reads_go() -> None:
    program, _ = summed("_tensor_constant0")
    program.root.register_buffer("_tensor_constant1", torch.ones(1))
    program.root.register_buffer("table", torch.ones(1))
    name_literals(program)
    assert sorted(program.root._buffers) == ["const_0", "table"]


def test_a_module_of_that_name_keeps_it() -> None:
    program, _ = summed("_tensor_constant0")
    program.root.add_module("const_0", torch.nn.ReLU())
    name_literals(program)
    assert read(program) == [("const_1", 1.0)]
    assert isinstance(program.graph, fx.Graph)
