"""The ONNX graph builder: nodes in order, names that are unique, constants that are stored once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from quantc.targets.onnx.dtypes import INT4
from quantc.targets.onnx.graph_builder import GraphBuilder


def run(build: GraphBuilder, output: str, **inputs: Any) -> Any:
    """What onnx's own evaluator makes of a graph."""
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in inputs.items()]
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, [1, 2])]
    graph = helper.make_graph(build.nodes, "graph", given, made, build.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    (found,) = ReferenceEvaluator(model).run(None, inputs)
    return found


def test_names_are_given_once() -> None:
    build = GraphBuilder()
    assert [build.name("x") for _ in range(3)] == ["x", "x.1", "x.2"]
    assert build.name("y.1") == "y.1"
    assert [build.name("y") for _ in range(3)] == ["y", "y.2", "y.3"], "y.1 is taken"
    hints = ["a", "a.1", "a", "a.1", "a.1.1", "a.2", "a"] * 2
    found = [build.name(hint) for hint in hints]
    assert len(set(found)) == len(found)
    assert all(name.startswith(hint) for name, hint in zip(found, hints, strict=True))


def test_nodes_are_named_after_what_is_being_written() -> None:
    build = GraphBuilder()
    assert build.emit("Relu", "x") == "Relu"
    build.scope = "conv2d"
    assert build.emit("Conv", "x", "w") == "conv2d"
    assert build.many("Split", ["x"], 2, axis=0) == ("conv2d.1", "conv2d.2")
    assert [node.name for node in build.nodes] == ["Relu", "conv2d", "conv2d.1"]


def test_attributes_of_none_are_left_out_and_inputs_of_no_name_are_kept() -> None:
    build = GraphBuilder()
    build.emit("Clip", "x", "", "high", axis=None, mode="linear")
    (node,) = build.nodes
    assert list(node.input) == ["x", "", "high"]
    assert [each.name for each in node.attribute] == ["mode"]


def test_equal_constants_are_stored_once_and_others_apart() -> None:
    build = GraphBuilder()
    x = torch.tensor([1.0, 0.0])
    first = build.constant(x, "weight")
    assert build.constant(x.clone(), "other") == first == "weight"
    apart = [
        build.constant(torch.tensor([1.0, -0.0])),
        build.constant(x.reshape(2, 1)),
        build.constant(x.double()),
        build.constant(x.to(torch.int8)),
        build.constant(x.to(torch.int8), kind=INT4),
    ]
    assert len({first, *apart}) == 6
    assert [tensor.name for tensor in build.initializers] == [first, *apart]


def test_numbers_and_scalars() -> None:
    build = GraphBuilder()
    build.numbers(range(3))
    build.numbers([])
    build.scalar(2.5, torch.float32)
    build.scalar(True, torch.bool)
    found = [numpy_helper.to_array(tensor) for tensor in build.initializers]
    assert [(value.dtype.name, value.shape) for value in found] == [
        ("int64", (3,)), ("int64", (0,)), ("float32", ()), ("bool", ()),
    ]  # fmt: skip
    assert found[0].tolist() == [0, 1, 2]
    assert found[2] == 2.5


def test_a_graph_runs() -> None:
    build = GraphBuilder()
    halves = build.cast(build.constant(torch.tensor([1, 2]), "levels"), torch.float32)
    made = build.emit("Add", build.emit("Mul", "x", halves), build.scalar(0.5, torch.float32))
    assert run(build, made, x=np.array([[1, 10]], np.float32)).tolist() == [[1.5, 20.5]]
