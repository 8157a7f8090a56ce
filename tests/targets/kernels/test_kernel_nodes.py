"""The kernels of a program, and what reads them."""

from __future__ import annotations

import operator

import torch

from quantc.ir.placements import Placed
from quantc.targets.kernels.kernel_nodes import is_image, is_read_in_order, kernel_of, kernels_of, tell_kernel
from tests.support.by_hand import Builder, aten
from tests.support.kernel_programs import ROW, WEIGHT, Scaling, Together, on_kernel


def test_a_reader_takes_any_order_if_it_is_an_aten_op_or_a_kernel_that_says_so() -> None:
    build = Builder()
    x = build.input("x", ROW)
    nodes = [on_kernel(build, name, Scaling(WEIGHT, absorbs=False), x) for name in ("aten", "kernel", "out", "strides")]
    behind = on_kernel(build, "reader", Scaling(WEIGHT), nodes[1])
    read = [build.call(aten.sin.default, nodes[0]), behind, nodes[2]]
    read.append(build.call(aten.as_strided.default, nodes[3], [3], [1]))
    program = build.program(*read)
    assert [is_read_in_order(program, node) for node in nodes] == [False, False, True, True]


def test_items_of_a_tuple_are_looked_through() -> None:
    build = Builder()
    x = build.input("x", ROW)
    nodes = [on_kernel(build, name, Together([Scaling(torch.ones(1))] * 3), x) for name in ("free", "bound")]
    parts = [build.call(operator.getitem, node, 1) for node in nodes]
    program = build.program(build.call(aten.sin.default, parts[0]), parts[1])
    assert [is_read_in_order(program, node) for node in nodes] == [False, True]


def test_the_rows_of_a_node_name_its_kernel() -> None:
    build = Builder()
    x = build.input("x", ROW)
    node = on_kernel(build, "mul", Scaling(WEIGHT), x)
    program = build.program(node)
    program.placements.ops["mul"] = Placed("mul", "mul", "old", "")
    program.placements.runs[node] = ("mul",)
    tell_kernel(program, node, "new")
    assert [row.kernel for row in program.placements.placed] == ["new"]
    assert [kernel_of(program, item) is None for item in (x, node)] == [True, False]
    assert [item for item, _ in kernels_of(program, program.graph)] == [node]


def test_images_are_tensors_of_four_or_five_axes() -> None:
    build = Builder()
    nodes = [build.input(f"x{rank}", torch.zeros([1] * rank)) for rank in range(2, 7)]
    assert [is_image(node) for node in nodes] == [False, False, True, True, False]
