"""Multiply-accumulates of ops, as torch's own counter of floating point operations has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import quantc as qc
from quantc.ir.mac_count import MultiplyAdds, example_sizes, is_product, products
from quantc.ir.program import Program
from tests.support.programs import Builder, aten

MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 8)),
    "grouped conv2d": (nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 8, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2, dilation=2), (1, 2, 4, 4, 4)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
    "linear": (nn.Linear(5, 7), (2, 3, 5)),
    "two layers": (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)), (3, 5)),
}


def total(program: Program) -> int:
    sizes = example_sizes(program)
    found = [products(node, sizes) for node in program.nodes()]
    return sum(each.count for row in found if row is not None for each in row)


def flops(model: Callable[..., Any], *inputs: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_half_of_what_torch_counts(name: str) -> None:
    model, shape = MODELS[name]
    x = torch.randn(shape)
    assert total(qc.capture(model.eval(), (x,))) * 2 == flops(model, x)


SHAPES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "matmul": (torch.matmul, ((2, 3, 4), (4, 5))),
    "addmm": (torch.addmm, ((5,), (3, 4), (4, 5))),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "attention": (nn.functional.scaled_dot_product_attention, ((2, 2, 3, 4), (2, 2, 6, 4), (2, 2, 6, 5))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_products_of_two_tensors_are_counted_as_torch_does(name: str) -> None:
    run, shapes = SHAPES[name]
    target = {
        "matmul": aten.matmul.default,
        "addmm": aten.addmm.default,
        "baddbmm": aten.baddbmm.default,
        "attention": aten.scaled_dot_product_attention.default,
    }[name]
    build = Builder()
    inputs = [build.input(f"x{index}", *shape) for index, shape in enumerate(shapes)]
    program = build.program(build.call(target, *inputs))
    # on the meta device torch counts the product that is written, whichever kernel would run it
    assert total(program) * 2 == flops(run, *(torch.empty(shape, device="meta") for shape in shapes))


def test_a_contraction_multiplies_along_every_label() -> None:
    build = Builder()
    x, y = build.input("x", 2, 3, 4), build.input("y", 2, 4, 5)
    explicit = build.call(aten.einsum.default, "bij, bjk -> bik", [x, y])
    implicit = build.call(aten.einsum.default, "abc,dce", [x, y])
    dotted = build.call(aten.einsum.default, "...ij,...jk->...ik", [x, y])
    alone = build.call(aten.einsum.default, "bij->b", [x])
    three = build.call(aten.einsum.default, "bij,bjk,bij->b", [x, y, x])
    build.program(explicit)
    assert products(explicit, {}) == products(dotted, {}) == (MultiplyAdds(2 * 3 * 4 * 5, (x, y)),)
    assert products(implicit, {}) == (MultiplyAdds(2 * 3 * 4 * 2 * 5, (x, y)),)
    assert products(alone, {}) == ()
    assert products(three, {}) is None, "the order is torch's choice"


def test_a_recurrent_layer_multiplies_every_weight_at_every_step() -> None:
    lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True).eval()
    program = qc.capture(lstm, (torch.randn(5, 2, 3),))
    (node,) = [node for node in program.nodes() if is_product(node)]
    found = products(node, example_sizes(program))
    assert found is not None
    weights = [p.numel() for name, p in lstm.named_parameters() if name.startswith("weight")]
    assert [each.count for each in found] == [5 * 2 * count for count in weights]
    x = program.graph.find_nodes(op="placeholder")[0]
    assert [each.factors[0] is x for each in found] == [True, False, True, False, False, False, False, False]


def test_a_cell_multiplies_its_input_and_its_state() -> None:
    program = qc.capture(nn.GRUCell(3, 4).eval(), (torch.randn(2, 3), torch.randn(2, 4)))
    (node,) = [node for node in program.nodes() if is_product(node)]
    found = products(node, example_sizes(program))
    assert found is not None
    assert [each.count for each in found] == [2 * 12 * 3, 2 * 12 * 4]


def test_dynamic_sizes_are_those_of_the_example() -> None:
    x = torch.randn(3, 5)
    program = qc.capture(nn.Linear(5, 7).eval(), (x,), dynamic_shapes={"input": {0: torch.export.Dim("n", min=2)}})
    sizes = example_sizes(program)
    assert list(sizes.values()) == [3]
    (linear,) = [node for node in program.nodes() if is_product(node)]
    assert [each.count for each in products(linear, sizes) or ()] == [3 * 5 * 7]
    assert products(linear, {}) is None
    program.example_inputs = None
    assert example_sizes(program) == {}


def test_ops_that_multiply_nothing_have_no_products() -> None:
    build = Builder()
    x = build.input("x", 2, 3)
    relu, mul = build.call(aten.relu.default, x), build.call(aten.mul.Tensor, x, x)
    build.program(relu)
    assert (products(relu, {}), products(mul, {})) == ((), ())
    assert not is_product(mul)
