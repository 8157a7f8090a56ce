"""The pass `merge-siblings`: kernels that read the same become one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

import quantc as qc
from quantc.ir.program import Program
from quantc.passes.merge_siblings import MergeSiblings
from quantc.targets.kernels.kernel import Kernel
from tests.support.by_hand import Builder
from tests.support.kernel_programs import Scaling, kernels, on_kernel


def siblings(*keys: Any) -> tuple[Program, list[fx.Node]]:
    build = Builder()
    x = build.input("x", torch.ones(2, 1))
    parts = [torch.arange(2.0) + 10 * index for index in range(len(keys))]
    nodes = [on_kernel(build, f"n{index}", Scaling(part, keys[index]), x) for index, part in enumerate(parts)]
    return build.program(*nodes), nodes


def test_kernels_that_read_the_same_become_one() -> None:
    program, nodes = siblings("a", "a", "a")
    expected = program(torch.ones(2, 1))
    outcome = MergeSiblings().run(program)
    assert outcome.notes == ("merged 3 siblings: kernel_n0, kernel_n1, kernel_n2",)
    assert not any(hasattr(program.root, str(node.target)) for node in nodes)
    (kernel,) = [found for found in kernels(program) if found.made_of]
    assert [part.get_buffer("weight").tolist() for part in kernel.made_of] == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    whole, *parts = [node for node in program.nodes() if node.op == "call_module" or node.target is operator.getitem]
    names = ("kernel_n0", "kernel_n1", "kernel_n2")
    assert program.placements.stands_for(whole) == names
    assert tuple(program.placements.stands_for(part) for part in parts) == names
    assert all(torch.equal(one, other) for one, other in zip(program(torch.ones(2, 1)), expected, strict=True))


def test_kernels_of_other_keys_and_without_one_stay_apart() -> None:
    program, _ = siblings("a", "b", None, None, "b")
    assert MergeSiblings().run(program).notes == ("merged 2 siblings: kernel_n1, kernel_n4",)


def test_kernels_that_read_something_else_stay_apart() -> None:
    build = Builder()
    x, y = build.input("x", torch.ones(2, 1)), build.input("y", torch.ones(2, 1))
    program = build.program(*(on_kernel(build, n, Scaling(torch.ones(2), "a"), s) for n, s in (("a", x), ("b", y))))
    assert not MergeSiblings().run(program)


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
