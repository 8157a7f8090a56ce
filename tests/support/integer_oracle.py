"""An independent reference for the integer form: Q/DQ programs in Python integers, NumPy's int64 and float64.

It reads the Q/DQ program alone: which nodes a rule has claimed, and the scales in its quantize and dequantize ops. What
an op computes is written in `integer_oracle_ops` from CONTRACTS.md and the published formulas. Nothing of
`quantc.integer` is used here.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantc.ir.program import Program
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.spec.arithmetic import EXACT, Arithmetic
from tests.support.integer_oracle_ops import Call, compute
from tests.support.integer_oracle_values import Exact, NotExactError, Steps, Terms


class Oracle:
    """Runs a Q/DQ program with each claimed match computed exactly and rounded once.

    `in_float` names nodes that are left in float: there the program does what torch does. A match whose first op is one
    of them is left in float as a whole. One whose first op is neither that nor known to the oracle is a NotExactError.
    Results are rounded as `arithmetic` says; its multipliers are taken for exact.
    """

    def __init__(self, program: Program, in_float: Collection[str] = (), arithmetic: Arithmetic = EXACT) -> None:
        self.program = program
        self.arithmetic = arithmetic
        claims = program.plan.claims.rows
        self.root_of = {node: claim.root for node, claim in claims.items()}
        members: dict[str, list[fx.Node]] = {}
        for node in program.graph.nodes:
            if node in self.root_of:
                members.setdefault(self.root_of[node], []).append(node)
        self.exact = {
            node
            for nodes in members.values()
            if nodes[0].name not in in_float
            for node in nodes
            if node.name not in in_float
        }
        self.cores = {nodes[0] for nodes in members.values()}
        self.ends_quantized = {root for root, nodes in members.items() if _is_quantized(nodes[-1])}

    def run(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """The value of every node by name: integers where it quantizes, float32 where floats are read.

        `given` are integers by the name of their quantize node. They are what is read from there on, so that each
        match is judged by what it does itself; the oracle's own are still in the result.
        """
        feed, known = iter(inputs), given or {}
        values: dict[fx.Node, Any] = {}
        found: dict[str, Any] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "output":
                found["output"] = map_arg(node.args[0], lambda item: plain(values[item]))
            else:
                values[node] = self._value(node, values)
                found[node.name] = values[node]
                values[node] = known.get(node.name, values[node])
        return found

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return self.program.tensor(node)
        if is_dequantize(node):
            return self._stands_for(node, values)
        if is_quantize(node) and isinstance(values[node.all_input_nodes[0]], Exact):
            return values[node.all_input_nodes[0]].onto(Steps.of(self.program, node), self.arithmetic)
        if node.target is operator.getitem:
            return values[node.all_input_nodes[0]][node.args[1]]
        if node not in self.exact:
            return self._as_torch_does(node, values)
        if node in self.cores:
            return compute(Call(self.program, node, values))
        return self._tail(node, values)

    def _tail(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """What follows the first op of a match: exact too, unless its result or another operand is float."""
        if self.root_of[node] not in self.ends_quantized:
            return self._as_torch_does(node, values)
        try:
            return compute(Call(self.program, node, values))
        except NotExactError:
            return self._as_torch_does(node, values)

    def _stands_for(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Terms:
        """Integers less their zero point, and the scale."""
        steps = Steps.of(self.program, node)
        ints = values[node.all_input_nodes[0]].detach().numpy().astype(np.int64)
        centered = ints - steps.along(steps.zero_point, ints.ndim)
        return Terms(((centered, steps.along(steps.scale, ints.ndim)),))

    def _as_torch_does(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        assert callable(node.target)
        args, kwargs = map_arg((node.args, node.kwargs), lambda item: plain(values[item]))
        return node.target(*args, **kwargs)


def plain(value: Any) -> Any:
    """A value as torch has it: numbers that are known exactly become float32."""
    if isinstance(value, Exact):
        return value.single()
    if isinstance(value, tuple | list):
        return type(value)(plain(item) for item in value)
    return value


def _is_quantized(root: fx.Node) -> bool:
    """Whether all that a match yields is quantized at once."""
    items = [user for user in root.users if user.target is operator.getitem] or [root]
    floats = [item for item in items if _is_float(item)]
    return bool(floats) and all(item.users and all(is_quantize(user) for user in item.users) for item in floats)


def _is_float(node: fx.Node) -> bool:
    kind = node.meta.get("val")
    return getattr(kind, "dtype", torch.float32).is_floating_point
