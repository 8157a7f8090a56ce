"""Kernel fusion: activations are taken in, layers that read the same become one, and results lie as the model's do."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

import quantc as qc
from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_fusion import (
    absorb_readers,
    erase_unread,
    in_usual_order,
    is_image,
    is_read_in_order,
    join_siblings,
    kernels_of,
    stands_for,
)
from tests.support.by_hand import Builder, aten
from tests.support.kernel_programs import Scaling, on_kernel

X = torch.tensor([[1.0, -2.0, 3.0]])
WEIGHT = torch.tensor([2.0, 2.0, -1.0])


def kernels(program: Program) -> list[Kernel]:
    return [kernel for _, kernel in kernels_of(program, program.graph)]


def calls(program: Program) -> list[str]:
    return [node.name for node in program.nodes() if node.op == "call_function"]


# -- what a kernel takes in --------------------------------------------------------------------------------------------


def test_the_only_reader_of_a_kernel_is_taken_in() -> None:
    build = Builder()
    scaled = on_kernel(build, "mul", Scaling(WEIGHT), build.input("x", X))
    program = build.program(build.call(aten.relu.default, scaled))
    absorb_readers(program)
    assert calls(program) == []
    assert [stands_for(node) for node, _ in kernels_of(program, program.graph)] == ["relu"]
    assert program(X).tolist() == [[2.0, 0.0, 0.0]]


def test_what_a_kernel_refuses_or_others_read_too_stays() -> None:
    build = Builder()
    x = build.input("x", X)
    refusing = on_kernel(build, "first", Scaling(WEIGHT, absorbs=False), x)
    shared = on_kernel(build, "second", Scaling(WEIGHT), x)
    made = [build.call(aten.relu.default, node) for node in (refusing, shared)]
    program = build.program(*made, shared)
    absorb_readers(program)
    assert calls(program) == ["relu", "relu_1"]
    assert stands_for(refusing) == "first"
    first, second, plain = program(X)
    assert torch.equal(first, second)
    assert plain.tolist() == [[2.0, -4.0, -3.0]]


class Greedy(Scaling):
    """A kernel that would take anything in."""

    def absorb(self, op: str) -> bool:
        return True


def test_an_op_that_reads_other_things_too_is_not_taken_in() -> None:
    build = Builder()
    x = build.input("x", X)
    scaled = on_kernel(build, "mul", Greedy(WEIGHT), x)
    program = build.program(build.call(aten.add.Tensor, scaled, x))
    absorb_readers(program)
    assert calls(program) == ["add"]


# -- how results lie in memory -----------------------------------------------------------------------------------------


def test_results_need_no_order_where_every_reader_takes_any() -> None:
    build = Builder()
    x = build.input("x", X)
    nodes = [on_kernel(build, name, Scaling(WEIGHT, absorbs=False), x) for name in ("aten", "kernel", "out", "strides")]
    behind = on_kernel(build, "reader", Scaling(WEIGHT), nodes[1])
    read = [build.call(aten.sin.default, nodes[0]), behind, nodes[2]]
    read.append(build.call(aten.as_strided.default, nodes[3], [3], [1]))
    program = build.program(*read)
    assert [is_read_in_order(program, node) for node in nodes] == [False, False, True, True]
    absorb_readers(program)
    assert [kernel.in_order for kernel in kernels(program)] == [False, False, True, True, True]


def test_images_leave_in_the_usual_order_and_other_tensors_as_they_are() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    build = Builder()
    x, y = build.input("x", image), build.input("y", torch.ones(3, 4))
    program = build.program(build.call(aten.sin.default, x), build.call(aten.cos.default, y))
    in_usual_order(program)
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
    in_usual_order(program)
    found = program(image.to(memory_format=torch.channels_last))
    assert found.stride() == image.sin().transpose(2, 3).stride()


def test_strides_are_read_of_a_tensor_in_order() -> None:
    build = Builder()
    matrix = torch.arange(6.0).reshape(2, 3)
    made = build.call(aten.sin.default, build.input("x", matrix))
    program = build.program(build.call(aten.as_strided.default, made, [6], [1]))
    in_usual_order(program)
    turned = matrix.t().contiguous().t()
    assert torch.equal(program(turned), matrix.sin().flatten())


def test_images_are_tensors_of_four_or_five_axes() -> None:
    build = Builder()
    nodes = [build.input(f"x{rank}", torch.zeros([1] * rank)) for rank in range(2, 7)]
    assert [is_image(node) for node in nodes] == [False, False, True, True, False]


# -- siblings ----------------------------------------------------------------------------------------------------------


def siblings(*keys: Any) -> tuple[Program, list[fx.Node]]:
    build = Builder()
    x = build.input("x", torch.ones(2, 1))
    parts = [torch.arange(2.0) + 10 * index for index in range(len(keys))]
    nodes = [on_kernel(build, f"n{index}", Scaling(part, keys[index]), x) for index, part in enumerate(parts)]
    return build.program(*nodes), nodes


def test_kernels_that_read_the_same_become_one() -> None:
    program, nodes = siblings("a", "a", "a")
    expected = program(torch.ones(2, 1))
    assert join_siblings(program) == dict.fromkeys(nodes, 3)
    (kernel,) = [found for found in kernels(program) if found.made_of]
    assert [part.get_buffer("weight").tolist() for part in kernel.made_of] == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    whole, *parts = [node for node in program.nodes() if node.op == "call_module" or node.target is operator.getitem]
    assert stands_for(whole) == ("n0", "n1", "n2")
    assert [stands_for(part) for part in parts] == ["n0", "n1", "n2"]
    assert all(torch.equal(one, other) for one, other in zip(program(torch.ones(2, 1)), expected, strict=True))


def test_kernels_of_other_keys_and_without_one_stay_apart() -> None:
    program, nodes = siblings("a", "b", None, None, "b")
    assert join_siblings(program) == {nodes[1]: 2, nodes[4]: 2}


def test_kernels_that_read_something_else_stay_apart() -> None:
    build = Builder()
    x, y = build.input("x", torch.ones(2, 1)), build.input("y", torch.ones(2, 1))
    program = build.program(*(on_kernel(build, n, Scaling(torch.ones(2), "a"), s) for n, s in (("a", x), ("b", y))))
    assert join_siblings(program) == {}


def test_kernels_that_nobody_reads_are_erased_one_after_the_other() -> None:
    build = Builder()
    x = build.input("x", X)
    first = on_kernel(build, "first", Scaling(WEIGHT), x)
    on_kernel(build, "second", Scaling(WEIGHT), first)
    kept = on_kernel(build, "kept", Scaling(WEIGHT), x)
    program = build.program(kept)
    erase_unread(program)
    assert [node.name for node, _ in kernels_of(program, program.graph)] == ["kernel_kept"]


def test_projections_of_attention_are_one_product_of_a_lowered_program() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            return [part(x) for part in self.parts]

    torch.manual_seed(0)
    x = torch.randn(3, 8)
    made = qc.lower(qc.quantize(Three().eval(), (x,), mode="dynamic").program, "x86")
    assert [row.kernel.endswith("3 in one") for row in made.placed] == [True] * 3
    assert sum(isinstance(module, Kernel) for module in made.module.modules()) == 1
    assert all(part.is_contiguous() for part in made(x))
