"""Small programs built node by node, for tests of patterns."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from quantc.ir.dialect import BY_NAME
from quantc.ir.program import Program
from quantc.ir.signature import Input, Signature
from quantc.patterns import Match, Matcher, Pattern, Refusal, Rule, RuleTable


class Build:
    """`b = Build(); x = b.input("x"); y = b("relu", x); program = b.done(y)`. Types are computed when inputs have them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.inputs: list[str] = []

    def input(self, name: str, *shape: int) -> fx.Node:
        self.inputs.append(name)
        node = self.graph.placeholder(name)
        if shape:
            node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def const(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        self.root.register_buffer(name, torch.ones(shape, dtype=dtype))
        node = self.graph.get_attr(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def __call__(self, op: str, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        return self.call(BY_NAME[op].target, *args, name=name or op, **kwargs)

    def call(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        values = {source: source.meta.get("val") for source in node.all_input_nodes}
        if values and all(value is not None for value in values.values()):
            given, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            node.meta["val"] = target(*given, **named)
        return node

    def done(self, *outputs: fx.Node) -> Program:
        self.graph.output(outputs)
        inputs = tuple(Input(name) for name in self.inputs)
        in_spec = pytree.tree_structure((tuple(self.inputs), {}))
        return Program(self.graph, self.root, Signature(inputs, in_spec, pytree.tree_structure(outputs)))


def attempt(pattern: Pattern, program: Program, node: fx.Node) -> Match | Refusal:
    return Matcher(program).attempt(Rule("rule", pattern), node)


def found(pattern: Pattern, program: Program, node: fx.Node) -> Match:
    outcome = attempt(pattern, program, node)
    assert isinstance(outcome, Match), str(outcome)
    return outcome


def refused(pattern: Pattern, program: Program, node: fx.Node) -> str:
    outcome = attempt(pattern, program, node)
    assert isinstance(outcome, Refusal), str(outcome)
    return outcome.reason


def taken(table: RuleTable, program: Program) -> list[tuple[str, tuple[str, ...]]]:
    """Which rule took which nodes, in graph order."""
    return [(match.rule.name, tuple(node.name for node in match.nodes)) for match in table.match(program)]


def table_of(*rules: Rule) -> RuleTable:
    """A table named `table`."""
    return RuleTable("table", rules)


def conv_block() -> tuple[Program, dict[str, fx.Node]]:
    """conv2d, sigmoid, relu, and a sum with the input."""
    b = Build()
    x, w = b.input("x", 1, 4, 8, 8), b.const("w", 4, 4, 1, 1)
    conv = b("conv2d", x, w)
    sigmoid = b("sigmoid", conv)
    relu = b("relu", sigmoid)
    add = b("add", relu, x)
    return b.done(add), {"conv": conv, "sigmoid": sigmoid, "relu": relu, "add": add}
