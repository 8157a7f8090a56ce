"""Regions that only set a mode, inlined where that changes nothing in inference."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from quantc.ir.program import Program
from quantc.ir.sites import ModeValue, Origin
from quantc.ir.types import TensorType
from quantc.rewrite.inline_wrappers import GRADIENTS_LOST, inline_wrappers
from tests.support.programs import aten, signature_of

GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
KIND = TensorType(torch.float32, (2,))


def region() -> fx.GraphModule:
    """(x * w, dropout(x))."""
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("w", torch.tensor([2.0, 3.0]))
    x = graph.placeholder("x")
    w = graph.create_node("get_attr", "w")
    w.meta["val"] = KIND
    product = graph.call_function(aten.mul.Tensor, (x, w))
    drop = graph.call_function(aten.dropout.default, (x, 0.5, False))
    for node in (x, product, drop):
        node.meta["val"] = KIND
    graph.output((product, drop))
    return fx.GraphModule(root, graph)


def wrapped(target: Any, *options: Any, inside: fx.GraphModule | None = None) -> Program:
    """The sum of what a region gives for `x`."""
    root, graph = nn.Module(), fx.Graph()
    root.body = region() if inside is None else inside
    root.register_buffer("w", torch.tensor([100.0, 100.0]))
    x = graph.placeholder("x")
    x.meta["val"] = KIND
    body = graph.create_node("get_attr", "body")
    call = graph.call_function(target, (*options, body, x))
    parts = [graph.call_function(operator.getitem, (call, index)) for index in (0, 1)]
    graph.output((graph.call_function(aten.add.Tensor, tuple(parts)),))
    return Program(graph, root, signature_of(graph, 1))


def ops(program: Program) -> list[str]:
    return [node.name for node in program.graph.nodes if node.op == "call_function"]


def test_a_region_without_gradients_becomes_its_body() -> None:
    program = wrapped(GRAD_MODE, False)
    inner = next(graph for path, graph in program.graphs() if path == "body")
    drop = inner.find_nodes(op="call_function", target=aten.dropout.default)[0]
    program.origins[drop] = Origin("drop")
    program.modes[drop] = ModeValue(2, True, False)
    assert inline_wrappers(program) == 1
    assert ops(program) == ["mul_tensor", "dropout_default", "add_tensor"]
    assert program.inference_only == (GRADIENTS_LOST,)
    new = program.node("dropout_default")
    assert (program.origins[new], program.modes[new]) == (Origin("drop"), ModeValue(2, True, False))
    assert drop not in program.modes
    assert program(torch.ones(2)).tolist() == [3.0, 4.0], "its constant is not the outer one of that name"


def test_a_program_that_trains_keeps_its_regions() -> None:
    program = wrapped(GRAD_MODE, False)
    program.training = True
    assert inline_wrappers(program) == 0
    assert program.inference_only == ()


def test_autocast_that_is_switched_off_is_inlined_and_loses_no_gradient() -> None:
    program = wrapped(AUTOCAST, "cpu", None, False, None)
    assert inline_wrappers(program) == 1
    assert program.inference_only == ()
    assert program(torch.ones(2)).tolist() == [3.0, 4.0]


def test_autocast_that_is_on_stays_with_what_is_inside() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.inner = region()
    x = graph.placeholder("x")
    body = graph.create_node("get_attr", "inner")
    call = graph.call_function(AUTOCAST, ("cpu", None, False, None, body, x))
    graph.output(tuple(graph.call_function(operator.getitem, (call, index)) for index in (0, 1)))
    program = wrapped(AUTOCAST, "cpu", torch.bfloat16, True, None, inside=fx.GraphModule(root, graph))
    assert inline_wrappers(program) == 0, "the inner one switches off what is on around it"


def test_regions_inside_regions_are_inlined_too() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.inner = region()
    x = graph.placeholder("x")
    call = graph.call_function(GRAD_MODE, (True, graph.create_node("get_attr", "inner"), x))
    graph.output(tuple(graph.call_function(operator.getitem, (call, index)) for index in (0, 1)))
    program = wrapped(GRAD_MODE, False, inside=fx.GraphModule(root, graph))
    assert inline_wrappers(program) >= 2
    assert ops(program) == ["mul_tensor", "dropout_default", "add_tensor"]
    assert program(torch.ones(2)).tolist() == [3.0, 4.0]
