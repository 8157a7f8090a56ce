"""Programs written node by node, for tests that must not depend on capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.ir.types import TensorType, type_of_value

aten = torch.ops.aten


class Builder:
    """Builds a program while running it, so that each node knows its type."""

    def __init__(self, **state: torch.Tensor) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.values: dict[fx.Node, Any] = {}
        self.examples: list[torch.Tensor] = []
        for name, tensor in state.items():
            if isinstance(tensor, nn.Parameter):
                self.root.register_parameter(name, tensor)
            else:
                self.root.register_buffer(name, tensor)

    def input(self, name: str, example: torch.Tensor) -> fx.Node:
        self.examples.append(example)
        return self._known(self.graph.placeholder(name), example.clone())

    def const(self, name: str) -> fx.Node:
        # the graph has no owner yet, of whose attributes fx could complain
        value = getattr(self.root, name)
        return self._known(self.graph.create_node("get_attr", name), value.detach().clone())

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        name = str(target).split(".")[1] if isinstance(target, OpOverload) else None
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        real = map_arg((args, kwargs), self.values.__getitem__)
        return self._known(node, target(*real[0], **real[1]))

    def _known(self, node: fx.Node, value: Any) -> fx.Node:
        self.values[node] = value
        kind = type_of_value(value)
        if kind is not None:
            node.meta["val"] = kind
        return node

    def program(self, *outputs: fx.Node, stage: Stage = Stage.CANONICAL) -> Program:
        self.graph.output(tuple(outputs))
        inputs = [
            Input(node.name, kind)
            for node in self.graph.find_nodes(op="placeholder")
            if isinstance(kind := node.meta["val"], TensorType)
        ]
        signature = Signature(
            tuple(inputs),
            pytree.tree_structure(((0,) * len(inputs), {})),
            pytree.tree_structure(0 if len(outputs) == 1 else (0,) * len(outputs)),
        )
        return Program(self.graph, self.root, signature, stage=stage, example_inputs=tuple(self.examples))


def two_layers(*, stage: Stage = Stage.CANONICAL) -> Program:
    """linear, relu, linear: five calls with names to blame."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=generator))

    build = Builder(w1=weight(8, 4), b1=weight(8), w2=weight(3, 8), b2=weight(3))
    x = build.input("x", torch.randn(2, 4, generator=generator))
    first = build.call(aten.linear.default, x, build.const("w1"), build.const("b1"))
    relu = build.call(aten.relu.default, first)
    second = build.call(aten.linear.default, relu, build.const("w2"), build.const("b2"))
    return build.program(build.call(aten.tanh.default, second), stage=stage)
