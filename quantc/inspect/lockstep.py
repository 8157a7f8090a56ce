"""Lockstep execution: runs a float program and a quantized one node by node, and compares their values.

Nodes are matched by name, which `convert` keeps. Values are dropped after their last use, in both programs, so peak
memory is that of running the two. Each op that reads quantized tensors is run once more, on the float program's values,
quantized like its operands: the remaining error is its own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import map_arg

from quantc.errors import InputError
from quantc.ir.alias_analysis import Aliasing
from quantc.ir.dialect import op_name
from quantc.ir.program import Program, Stage
from quantc.ir.site_index import operand_nodes
from quantc.ir.types import tensor_type
from quantc.pipeline.numeric_guard import NodeByNode
from quantc.qdq.ops import belongs_to_qdq, is_quantize
from quantc.support.sqnr import Noise, add_outputs, check_alike


class Lane(NodeByNode):
    """One program, run a node at a time."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.program = program
        self.order: list[fx.Node] = list(program.graph.nodes)

    def start(self, leaves: Sequence[Any]) -> None:
        self.env = {}
        self.args_iter = iter(leaves)

    def step(self, node: fx.Node) -> Any:
        """Run one node; the nodes before it have been run."""
        try:
            value = self.env[node] = self.run_node(node)
        except Exception as error:
            raise InputError(
                f"{self.program.name} does not run on this batch: {type(error).__name__}: {error}",
                where=self.program.describe(node),
                advice="give batches that the model takes",
            ) from error
        return value

    def drop(self, node: fx.Node) -> list[fx.Node]:
        """Drop values whose last use is a node; returns them."""
        last = self.user_to_last_uses.get(node, [])
        for value in last:
            self.env.pop(value, None)
        return last


class Lockstep:
    """Two programs side by side. `cumulative` and `local` hold the noise of each node that both have, by name."""

    def __init__(self, reference: Program, quantized: Program) -> None:
        self.reference = Lane(reference)
        self.quantized = Lane(quantized)
        self.twins, self.apart = twins(reference, quantized)
        self.cumulative: dict[str, Noise] = {node.name: Noise() for node in self.twins if is_compared(node)}
        self.local: dict[str, Noise] = {}
        self.vanished: dict[str, tuple[int, int]] = {}
        """By the node whose result is quantized: how many of its numbers became zero, and how many were not."""
        self.outputs: list[Noise] = []
        self.largest: list[float] = []
        """The largest difference of a number, output by output."""
        self.can_repeat = not is_integer(quantized) and not any(map(_may_write, (reference, quantized)))
        """True if ops can be run again: nothing writes, and values are float; differences of integers are not comparable."""
        self._wanted = frozenset(self.twins.values())

    @torch.no_grad()
    def run(self, reference_inputs: Sequence[Any], quantized_inputs: Sequence[Any]) -> None:
        """Run one batch, given as flat inputs."""
        self.reference.start(reference_inputs)
        self.quantized.start(quantized_inputs)
        ahead = iter(self.reference.order)
        held: dict[fx.Node, Any] = {}
        shadow: dict[fx.Node, Any] = {}
        value: Any = ()
        for node in self.quantized.order:
            twin = self.twins.get(node)
            while twin is not None and twin not in held:
                self._advance(next(ahead), held)
            value = self.quantized.step(node)
            if node.op == "output":
                continue
            shadow[node] = self._shadow(node, value, shadow) if twin is None else held.pop(twin)
            if is_quantize(node):
                self._count_vanished(node, shadow)
            if twin is not None and node.name in self.cumulative:
                self._compare(node, value, shadow)
            for old in self.quantized.drop(node):
                shadow.pop(old, None)
        expected: Any = ()
        for node in ahead:
            expected = self._advance(node, held)
        self._compare_outputs(expected, value)

    def _advance(self, node: fx.Node, held: dict[fx.Node, Any]) -> Any:
        value = self.reference.step(node)
        if node in self._wanted:
            held[node] = value
        self.reference.drop(node)
        return value

    def _compare(self, node: fx.Node, value: Any, shadow: dict[fx.Node, Any]) -> None:
        expected = shadow[node]
        self.cumulative[node.name].add(expected, value)
        if not self.can_repeat or not any(is_qdq(operand) for operand in node.all_input_nodes):
            return
        self.local.setdefault(node.name, Noise()).add(expected, self._run(node, shadow))

    def _count_vanished(self, node: fx.Node, shadow: dict[fx.Node, Any]) -> None:
        """Count non-zero values below half a step."""
        source, zero_point = node.args[0], node.args[2]
        if not self.can_repeat or not isinstance(source, fx.Node) or "per_tensor" not in str(node.target):
            return
        is_some = shadow[source] != 0
        is_gone = is_some & (shadow[node] == (shadow[zero_point] if isinstance(zero_point, fx.Node) else zero_point))
        zeros, count = self.vanished.get(source.name, (0, 0))
        self.vanished[source.name] = zeros + int(is_gone.sum()), count + int(is_some.sum())

    def _shadow(self, node: fx.Node, value: Any, shadow: dict[fx.Node, Any]) -> Any:
        """Value of a node that the float program does not have, on the float program's values."""
        env = self.quantized.env
        if not self.can_repeat or all(env[operand] is shadow[operand] for operand in node.all_input_nodes):
            return value
        return self._run(node, shadow)

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        return getattr(self.quantized, node.op)(node.target, args, kwargs)

    def _compare_outputs(self, expected: Any, value: Any) -> None:
        """Compare outputs: an output node's value is the list of the program's results."""
        check_alike(expected, value, (self.reference.program.name, self.quantized.program.name))
        add_outputs(expected, value, self.outputs, self.largest)


def is_compared(node: fx.Node) -> bool:
    """True if a node has a row of its own: it computes, rather than picks an item."""
    return node.op.startswith("call_") and node.target is not operator.getitem


def is_integer(program: Program) -> bool:
    """True if a program is in integer form."""
    return program.stage >= Stage.LOWERED


def is_qdq(node: fx.Node) -> bool:
    return belongs_to_qdq(node)


def twins(reference: Program, quantized: Program) -> tuple[dict[fx.Node, fx.Node], list[fx.Node]]:
    """Map from each node of the quantized program to its counterpart: same name, same op, same operands.

    Also the ops of the quantized program without one. Integer ops have none by nature.
    """
    named = {node.name: node for node in reference.graph.nodes}
    found: dict[fx.Node, fx.Node] = {}
    apart: list[fx.Node] = []
    on_integers, noted = is_integer(quantized), quantized.plan.left_float
    for node in quantized.graph.nodes:
        if is_qdq(node) or node.op in ("output", "get_attr"):
            continue
        if on_integers and node.op != "placeholder" and node not in noted:
            continue  # it computes on integers, or is a step to or from them
        twin = named.get(node.name)
        is_same = twin is not None and op_name(twin) == op_name(node) and _may_be_alike(twin, node)
        # operands of integer ops have other names; the ops keep theirs
        if twin is not None and is_same and (on_integers or _reads(twin) == _reads(node)):
            found[node] = twin
        else:
            apart.append(node)
    return found, apart


def _may_be_alike(left: fx.Node, right: fx.Node) -> bool:
    """True if the values of two nodes can be compared elementwise: equal dtype and shape, as far as known."""
    one, other = tensor_type(left), tensor_type(right)
    if one is None or other is None:
        return True
    # symbols go by other names in another capture
    sizes = zip(one.shape, other.shape, strict=False)
    fits = all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in sizes)
    return fits and one.dtype == other.dtype and one.rank == other.rank


def _reads(node: fx.Node) -> list[str]:
    """Operands of a node by name, as if there were no Q/DQ ops. Constants have no name: they are stored anew."""
    return [_origin(operand) for operand in operand_nodes(node)]


def _origin(node: fx.Node) -> str:
    while is_qdq(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return "" if node.op == "get_attr" else node.name


def _may_write(program: Program) -> bool:
    """True if running an op twice could do harm: it writes in place, or is opaque."""
    return any(node.op in ("call_module", "call_method") for node in program.graph.nodes) or any(
        Aliasing(graph, program.owner(graph)).has_writes for _, graph in program.graphs()
    )


def calls_graphs(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator)
