"""Dtypes that weights prove, in programs captured without example inputs."""

from __future__ import annotations

import torch
from torch import fx

from quantc.ir.types import TensorType
from quantc.rewrite.infer_dtype import STEPS, proven_dtype

aten = torch.ops.aten


def weight(graph: fx.Graph, dtype: torch.dtype = torch.float16) -> fx.Node:
    node = graph.placeholder("w")
    node.meta["val"] = TensorType(dtype, (4, 4))
    return node


def test_a_linear_proves_its_result_and_its_input() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    linear = graph.call_function(aten.linear.default, (x, weight(graph)))
    assert proven_dtype(linear) is torch.float16
    assert proven_dtype(x) is torch.float16


def test_a_known_type_comes_before_what_it_feeds() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorType(torch.float32, (2, 4))
    graph.call_function(aten.linear.default, (x, weight(graph)))
    assert proven_dtype(x) is torch.float32


def test_ops_that_keep_the_dtype_are_followed_back() -> None:
    graph = fx.Graph()
    linear = graph.call_function(aten.linear.default, (graph.placeholder("x"), weight(graph)))
    relu = graph.call_function(aten.relu.default, (linear,))
    turned = graph.call_function(aten.transpose.int, (relu, 0, 1))
    cast = graph.call_function(aten.to.dtype, (turned, torch.float64))
    assert proven_dtype(turned) is torch.float16
    assert proven_dtype(cast) is None, "a cast makes another"


def test_only_the_first_operand_of_a_layer_is_proven_by_its_weight() -> None:
    graph = fx.Graph()
    unknown, bias = graph.placeholder("unknown"), graph.placeholder("bias")
    graph.call_function(aten.linear.default, (graph.placeholder("x"), unknown))
    graph.call_function(aten.linear.default, (graph.placeholder("y"), weight(graph), bias))
    assert proven_dtype(unknown) is None
    assert proven_dtype(bias) is None
    assert proven_dtype(3.0) is None


def test_the_search_ends_after_some_steps() -> None:
    graph = fx.Graph()
    value = graph.call_function(aten.linear.default, (graph.placeholder("x"), weight(graph)))
    for _ in range(STEPS - 1):
        value = graph.call_function(aten.relu.default, (value,))
    assert proven_dtype(value) is torch.float16
    assert proven_dtype(graph.call_function(aten.relu.default, (value,))) is None
