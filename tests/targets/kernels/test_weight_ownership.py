"""Weight ownership: a plain weight is released once a packed one holds it too, and comes back when asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.weight_ownership import Holdings
from tests.support.by_hand import Builder, aten
from tests.support.kernel_programs import Scaling, Together

X = torch.ones(1, 3)


def program_with(**weights: Tensor) -> Program:
    """The sum of an input times each of some weights."""
    build = Builder(**weights)
    made = build.input("x", X)
    for name in weights:
        made = build.call(aten.mul.Tensor, made, build.const(name))
    return build.program(made)


def module_of(*kernels: Kernel) -> fx.GraphModule:
    """A module that runs kernels one after the other."""
    graph, root = fx.Graph(), torch.nn.Module()
    made = graph.placeholder("x")
    for index, kernel in enumerate(kernels):
        root.add_module(f"kernel_{index}", kernel)
        made = graph.create_node("call_module", f"kernel_{index}", (made,))
    graph.output(made)
    return fx.GraphModule(root, graph)


def held(weight: Tensor, kind: type[Scaling] = Scaling) -> tuple[Program, Scaling, Holdings]:
    program, kernel = program_with(w=weight), kind(weight)
    return program, kernel, Holdings(program, module_of(kernel))


def test_a_weight_that_is_packed_is_released_and_comes_back_bit_for_bit() -> None:
    weight = torch.randn(3)
    kept = weight.clone()
    program, kernel, holdings = held(weight)
    expected = program(X)
    kernel(X)
    holdings.release()
    assert kernel.optional_buffer("weight") is None
    assert program.root.get_buffer("w").is_meta
    whole = holdings.whole()
    assert whole is not program
    assert torch.equal(whole.root.get_buffer("w"), kept)
    assert torch.equal(whole(X), expected)
    assert torch.equal(kernel(X), X * kept)
    assert program.root.get_buffer("w").is_meta, "only the copy has it again"


class Sharing(Scaling):
    """Gives its packed weight itself back."""

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": packed}


def test_what_comes_back_is_a_copy_of_its_own() -> None:
    program, kernel, holdings = held(torch.ones(3), Sharing)
    kernel(X)
    holdings.release()
    holdings.whole().root.get_buffer("w").zero_()
    assert bool(holdings.whole().root.get_buffer("w").all())
    assert torch.equal(kernel(X), X)
    assert program.root.get_buffer("w").is_meta


def test_a_kernel_that_has_not_run_keeps_its_weight() -> None:
    program, kernel, holdings = held(torch.ones(3))
    holdings.release()
    assert kernel.get_buffer("weight").tolist() == [1.0, 1.0, 1.0]
    assert holdings.whole() is program
    kernel(X)
    holdings.release()
    assert kernel.optional_buffer("weight") is None


class Lossy(Scaling):
    """Packs its weight in fewer bits, from which it does not come back as it was."""

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": packed.half().float()}


class Opaque(Scaling):
    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize("kind", [Lossy, Opaque])
def test_a_weight_that_would_not_come_back_is_kept(kind: type[Scaling]) -> None:
    program, kernel, holdings = held(torch.full((3,), 1 / 3), kind)
    kernel(X)
    holdings.release()
    assert torch.equal(kernel.get_buffer("weight"), torch.full((3,), 1 / 3))
    assert holdings.whole() is program
    assert not program.root.get_buffer("w").is_meta


def test_rows_of_a_joined_kernel_go_back_to_the_weights_they_came_from() -> None:
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    program = program_with(a=first, b=second)
    parts = [Scaling(first), Scaling(second)]
    together = Together(parts)
    together.made_of = tuple(parts)
    holdings = Holdings(program, module_of(together))
    together(X)
    holdings.release()
    assert program.root.get_buffer("a").is_meta
    assert program.root.get_buffer("b").is_meta
    whole = holdings.whole().root
    assert whole.get_buffer("a").tolist() == [1.0, 2.0, 3.0]
    assert whole.get_buffer("b").tolist() == [4.0, 5.0, 6.0]
    assert together.made_of == ()


def test_a_weight_of_two_names_comes_back_under_both_and_others_stay() -> None:
    weight, other = torch.arange(3.0), torch.ones(3)
    program, kernel = program_with(a=weight, b=weight, c=other), Scaling(weight)
    holdings = Holdings(program, module_of(kernel))
    kernel(X)
    holdings.release()
    assert [program.root.get_buffer(name).is_meta for name in "abc"] == [True, True, False]
    assert set(holdings.parts) == {"a", "b"}
    assert torch.equal(holdings.whole()(X), X * weight * weight)


def test_releasing_in_inference_mode_leaves_nothing_that_cannot_be_used_outside() -> None:
    _, kernel, holdings = held(torch.ones(3))
    kernel(X)
    with torch.inference_mode():
        holdings.release()
    assert not holdings.whole().root.get_buffer("w").is_inference()
