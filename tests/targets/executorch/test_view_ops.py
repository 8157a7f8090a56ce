"""Ops for the delegate that keep values: between quantize and dequantize ops, so that it may move levels."""

from __future__ import annotations

import torch
from torch import Tensor

from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType
from quantc.qdq.registration import decomposed_ops
from quantc.targets.executorch.view_ops import Mover, reshape_sizes
from tests.support.by_hand import Builder

aten = torch.ops.aten
GRID = (0.25, -3, -128, 127, torch.int8)
X = torch.linspace(-2, 2, 6).reshape(2, 3)


def program(*, is_quantized: bool) -> Program:
    build, ops = Builder(), decomposed_ops()
    value = build.input("x", X)
    if is_quantized:
        levels = build.call(ops.quantize_per_tensor.default, value, *GRID)
        value = build.call(ops.dequantize_per_tensor.default, levels, *GRID)
    return build.program(build.call(aten.relu.default, value), stage=Stage.QUANTIZED)


def moved(given: Program, name: str = "") -> list[str]:
    """The ops that a transpose before the relu is made of; the relu then reads them."""
    relu = given.node("relu")
    (source,) = relu.all_input_nodes
    before = set(given.graph.nodes)
    made = Mover(given, relu, name).move(
        source, aten.permute_copy.default, ([1, 0],), TensorType(torch.float32, (3, 2))
    )
    relu.args = (made,)
    relu.meta["val"] = TensorType(torch.float32, (3, 2))
    fresh = [node for node in given.graph.nodes if node not in before]
    assert {given.plan.made_for[node] for node in fresh} == {name}
    return [str(node.target).split(".")[1] for node in fresh]


def result(given: Program) -> Tensor:
    (found,) = given.run_flat([X])
    assert isinstance(found, Tensor)
    return found


def test_sizes_that_vary_are_left_to_the_reshape() -> None:
    assert reshape_sizes((2, 3)) == [2, 3]
    assert reshape_sizes(("batch", 3, 4)) == [-1, 3, 4]
    assert reshape_sizes(()) == []


def test_levels_are_moved_as_levels() -> None:
    given = program(is_quantized=True)
    want = result(given).t()
    assert moved(given) == ["permute_copy", "quantize_per_tensor", "dequantize_per_tensor"]
    assert torch.equal(result(given), want)
    dequantize = given.node("relu").all_input_nodes[0]
    assert dequantize.args[1:] == GRID
    levels = dequantize.all_input_nodes[0]
    assert levels.meta["val"] == TensorType(torch.int8, (3, 2))
    assert dequantize.meta["val"] == TensorType(torch.float32, (3, 2))


def test_floats_are_moved_as_floats() -> None:
    given = program(is_quantized=False)
    want = result(given).t()
    assert moved(given, "relu") == ["permute_copy"]
    assert torch.equal(result(given), want)


def test_one_op_is_emitted_before_the_node_with_its_type_and_name() -> None:
    given = program(is_quantized=False)
    relu = given.node("relu")
    made = Mover(given, relu, "conv2d").emit(aten.neg.default, (relu.args[0],), TensorType(torch.float32, (2, 3)))
    assert made.next is relu
    assert made.meta["val"] == TensorType(torch.float32, (2, 3))
    assert given.plan.made_for[made] == "conv2d"
