"""Small Programs built by hand, and from torch.export, for tests of the text formats and the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.ir.sites import ModeValue, Origin
from quantc.ir.types import TensorType, type_of_value

aten = torch.ops.aten


def signature_of(graph: fx.Graph, outputs: int) -> Signature:
    """All inputs positional; one output alone, several as a tuple."""
    inputs = []
    for node in graph.find_nodes(op="placeholder"):
        kind = type_of_value(node.meta.get("val"))
        inputs.append(Input(node.name, kind if isinstance(kind, TensorType) else None))
    in_spec = pytree.tree_structure((tuple(0 for _ in inputs), {}))
    out_spec = pytree.tree_structure(0 if outputs == 1 else (0,) * outputs)
    return Signature(tuple(inputs), in_spec, out_spec)


class Builder:
    """Builds a graph one call at a time, with real values in mind: every node has its type."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()

    def input(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def constant(self, name: str, value: torch.Tensor) -> fx.Node:
        if isinstance(value, nn.Parameter):
            self.root.register_parameter(name, value)
        else:
            self.root.register_buffer(name, value)
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = type_of_value(value)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        name = target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        values = map_arg((args, kwargs), _meta)
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def program(self, *outputs: fx.Node, name: str = "Net") -> Program:
        self.graph.output(tuple(outputs))
        return Program(self.graph, self.root, signature_of(self.graph, len(outputs)), name=name)


def _meta(node: fx.Node) -> Any:
    value = node.meta["val"]
    if not isinstance(value, TensorType):
        return value
    return torch.empty([int(size) for size in value.shape], dtype=value.dtype, device="meta")


def relu_times_constant() -> Program:
    """A relu, then a product with a buffer, with origins."""
    build = Builder()
    x = build.input("x", 2, 3)
    w = build.constant("layer_w", torch.tensor([1.0, 2.0, 3.0]))
    relu = build.call(aten.relu.default, x)
    program = build.program(build.call(aten.mul.Tensor, relu, w))
    program.origins[relu] = Origin("layer.act", "torch.nn.ReLU", "model.py", 3)
    program.origins[program.node("mul")] = Origin("layer2", "M")
    return program


def small_net() -> Program:
    """conv, batch norm (with a counter and a mode), dropout (a mode), linear: one of each kind of line."""
    build = Builder()
    x = build.input("x", 2, 3, 4, 4)
    weight = build.constant("w", nn.Parameter(torch.arange(54.0).reshape(2, 3, 3, 3)))
    mean, var = build.constant("mean", torch.zeros(2)), build.constant("var", torch.ones(2))
    conv = build.call(aten.conv2d.default, x, weight, None, [1, 1], [1, 1])
    norm = build.call(aten.batch_norm.default, conv, None, None, mean, var, False, 0.1, 1e-5, True)
    drop = build.call(aten.dropout.default, norm, 0.5, False)
    build.root.register_buffer("count", torch.tensor(7))
    program = build.program(build.call(aten.relu.default, drop))
    program.stage = Stage.CANONICAL
    program.origins[conv] = Origin("c", "torch.nn.modules.conv.Conv2d", "/home/someone/model.py", 12)
    program.modes[norm] = ModeValue(5, True, False)
    program.modes[drop] = ModeValue(2, True, False)
    program.counters[norm] = "count"
    return program


def exported(model: nn.Module, inputs: Sequence[torch.Tensor], **options: Any) -> Program:
    """A Program straight from torch.export, without canonicalization."""
    captured = torch.export.export(model, tuple(inputs), **options)
    module = captured.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    types = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    rows = []
    for name, value in zip(names, types, strict=True):
        kind = type_of_value(value)
        rows.append(Input(name, kind if isinstance(kind, TensorType) else None))
    spec = captured.call_spec
    assert spec.in_spec is not None
    assert spec.out_spec is not None
    ranges: dict[str, tuple[int, int | None]] = {
        str(symbol): (int(bound.lower), None if str(bound.upper) == "int_oo" else int(bound.upper))
        for symbol, bound in captured.range_constraints.items()
    }
    signature = Signature(tuple(rows), spec.in_spec, spec.out_spec, ranges)
    return Program(module.graph, module, signature, name=type(model).__name__, method="export")


class Choice(nn.Module):
    """A cond with another cond inside, and a dict among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        def inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            chosen: torch.Tensor = torch.cond(a.mean() > 1, torch.add, torch.mul, (a, b))
            return chosen

        y = self.second(self.first(x))
        return torch.cond(x.sum() > 0, inner, torch.sub, (x, y)), {"y": y}


def chain(length: int) -> Program:
    """relu and add in turn, the input feeding every add: a chain and a star at once."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = TensorType(torch.float32, (2, 2))
    last = x
    for index in range(length):
        target, args = (aten.add.Tensor, (last, x)) if index % 2 else (aten.relu.default, (last,))
        last = graph.call_function(target, args)
        last.meta["val"] = x.meta["val"]
    graph.output((last,))
    return Program(graph, nn.Module(), signature_of(graph, 1), name="chain")


def bytes_digest(array: np.ndarray[Any, Any]) -> str:
    """The digest that dumps have for a constant with these elements."""
    return blake2b(array.tobytes(), digest_size=4).hexdigest()
