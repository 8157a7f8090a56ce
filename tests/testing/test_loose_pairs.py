"""Tensors of a lowered module that become float only to be rounded again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import quantc as qc
from quantc.qdq.registration import decomposed_ops
from quantc.testing.loose_pairs import Kind, loose_pairs


class Chain(nn.Module):
    """A convolution, what moves its result, and a layer that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.relu(self.conv(x)).flatten(1))


def chain() -> qc.Lowered:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    prepared = qc.prepare(qc.capture(Chain().eval(), (x,)), "x86")
    qc.calibrate(prepared, [x], progress="silent")
    return qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")


def node_of(module: fx.GraphModule, word: str) -> fx.Node:
    found: fx.Node = next(node for node in module.graph.nodes if word in node.name)
    return found


GRID = (0.1, 3, 0, 255, torch.uint8)


def leave_bytes(lowered: qc.Lowered, *, other: bool = False) -> None:
    """Put a dequantize and a quantize op between the convolution and the layer, by hand."""
    ops, graph = decomposed_ops(), lowered.module.graph
    move = node_of(lowered.module, "flatten")
    source: Any = move.args[0]
    kind = source.meta["val"]
    with graph.inserting_before(move):
        real = graph.call_function(ops.dequantize_per_tensor.default, (source, *GRID))
        real.meta["val"] = replace(kind, dtype=torch.float32)
        between = graph.call_function(torch.ops.aten.sin.default, (real,)) if other else real
        between.meta["val"] = real.meta["val"]
    with graph.inserting_after(move):
        move.replace_input_with(source, between)
        move.meta["val"] = replace(move.meta["val"], dtype=torch.float32)
        again = graph.call_function(ops.quantize_per_tensor.default, (move, *GRID))
        move.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def test_a_region_of_bytes_has_no_loose_pairs() -> None:
    assert loose_pairs(chain()) == ()


def test_what_is_dequantized_moved_and_quantized_again_is_found() -> None:
    lowered = chain()
    leave_bytes(lowered)
    (pair,) = loose_pairs(lowered)
    assert pair.kind is Kind.PAIR
    assert "dequantize" in pair.source
    assert "quantized again" in str(pair)


def test_what_is_computed_in_float_in_between_is_none() -> None:
    lowered = chain()
    leave_bytes(lowered, other=True)
    assert loose_pairs(lowered) == ()


def test_a_product_that_ends_in_float_though_all_its_readers_round_it_is_found() -> None:
    lowered = chain()
    ops, graph = decomposed_ops(), lowered.module.graph
    (out,) = graph.find_nodes(op="output")
    head: Any = out.args[0][0]
    with graph.inserting_before(out):
        made = graph.call_function(ops.quantize_per_tensor.default, (head, *GRID))
        out.replace_input_with(head, made)
        twice = graph.call_function(ops.quantize_per_tensor.default, (head, *GRID))
        out.args = ((made, twice),)
    kinds = [pair.kind for pair in loose_pairs(lowered)]
    assert kinds == [Kind.ENDING, Kind.ENDING, Kind.TWICE]
    out.args = ((made, head),)  # somebody reads it in float
    assert [pair.kind for pair in loose_pairs(lowered) if pair.kind is Kind.ENDING] == []
