"""The pass `assign-memory-format`: kernels pass images on as they make them, and results lie as the model's do."""

from __future__ import annotations

import torch

from quantc.passes.assign_memory_format import AssignMemoryFormat
from tests.support.by_hand import Builder, aten
from tests.support.kernel_programs import ROW, WEIGHT, Scaling, calls, kernels, on_kernel


def test_results_need_no_order_where_every_reader_takes_any() -> None:
    build = Builder()
    x = build.input("x", ROW)
    nodes = [on_kernel(build, name, Scaling(WEIGHT, absorbs=False), x) for name in ("aten", "kernel", "out", "strides")]
    behind = on_kernel(build, "reader", Scaling(WEIGHT), nodes[1])
    read = [build.call(aten.sin.default, nodes[0]), behind, nodes[2]]
    read.append(build.call(aten.as_strided.default, nodes[3], [3], [1]))
    program = build.program(*read)
    AssignMemoryFormat().run(program)
    assert [kernel.in_order for kernel in kernels(program)] == [False, False, True, True, True]


def test_images_leave_in_the_usual_order_and_other_tensors_as_they_are() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    build = Builder()
    x, y = build.input("x", image), build.input("y", torch.ones(3, 4))
    program = build.program(build.call(aten.sin.default, x), build.call(aten.cos.default, y))
    AssignMemoryFormat().run(program)
    assert calls(program) == ["sin", "cos", "contiguous"]
    found, matrix = program(image.to(memory_format=torch.channels_last), torch.ones(4, 3).t())
    assert found.is_contiguous()
    assert torch.equal(found, image.sin())
    assert not matrix.is_contiguous()


def test_what_a_view_shows_is_put_in_order_below_it() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    build = Builder()
    made = build.call(aten.sin.default, build.input("x", image))
    program = build.program(build.call(aten.transpose.int, made, 2, 3))
    AssignMemoryFormat().run(program)
    found = program(image.to(memory_format=torch.channels_last))
    assert found.stride() == image.sin().transpose(2, 3).stride()


def test_strides_are_read_of_a_tensor_in_order() -> None:
    build = Builder()
    matrix = torch.arange(6.0).reshape(2, 3)
    made = build.call(aten.sin.default, build.input("x", matrix))
    program = build.program(build.call(aten.as_strided.default, made, [6], [1]))
    AssignMemoryFormat().run(program)
    turned = matrix.t().contiguous().t()
    assert torch.equal(program(turned), matrix.sin().flatten())
