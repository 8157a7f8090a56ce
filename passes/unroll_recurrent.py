"""Recurrent layers as loops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from quantc.ir.dialect import argument, is_op, op_name, short_name
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, TupleType, ValueType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.builder import known_type

aten = torch.ops.aten
RANK = 3
"""The axes of a batch of sequences."""


class UnrollRecurrent(Pass):
    """Write recurrent layers as products with the inputs of all steps, and one `scan` for each layer and direction.

    ExecuTorch's exporter writes a recurrent layer out step by step, which takes minutes for a few dozen steps. Here the
    products of all steps with the input are one linear layer, which a delegate takes like any other, and the steps are
    one loop, whose body is written once. A layer in training, one with projections, and one whose types are unknown stay
    as they are, and the log says why.
    """

    name: ClassVar[str] = "unroll-recurrent"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        written, left = 0, []
        for node in [node for node in program.nodes() if is_op(node, *CELLS)]:
            reason = why_not_loop(node)
            if reason is None:
                Unrolled.of(program, node).write()
                written += 1
            else:
                left.append(f"{program.describe(node)} is left whole: {reason}")
        return Outcome(written > 0, (*((f"{written} written as loops",) if written else ()), *left))


# -- one step ------------------------------------------------------------------------------------------------------


class Body:
    """The graph of one step: each call is a function of tensors of one shape, but for products and parts."""

    def __init__(self, state: TensorType) -> None:
        self.graph = fx.Graph()
        self.state = state

    def input(self, name: str, kind: TensorType | None) -> fx.Node:
        node = self.graph.placeholder(name)
        if kind is not None:
            node.meta["val"] = kind
        return node

    def call(self, target: Any, *args: Any, kind: ValueType | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, {}, name=short_name(target))
        node.meta["val"] = self.state if kind is None else kind
        return node

    def product(self, x: fx.Node, weight: fx.Node) -> fx.Node:
        kind = TensorType(self.state.dtype, (self.state.shape[0], known_type(weight).shape[1]))
        return self.call(aten.mm.default, x, weight, kind=kind)

    def sum(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, x, y, kind=known_type(x))

    def parts(self, x: fx.Node, count: int) -> list[fx.Node]:
        """Equal parts of the last axis, each as large as the state."""
        whole = self.call(aten.chunk.default, x, count, -1, kind=TupleType((self.state,) * count))
        found = [self.graph.create_node("call_function", operator.getitem, (whole, place)) for place in range(count)]
        for part in found:
            part.meta["val"] = self.state
        return found

    def sigmoid(self, x: fx.Node) -> fx.Node:
        return self.call(aten.sigmoid.default, x)


Step = Callable[[Body, Sequence[fx.Node], fx.Node, fx.Node, fx.Node], tuple[fx.Node, ...]]
"""From the state, the product with the input, the state's weight, and its bias to the next state."""


def _lstm(body: Body, state: Sequence[fx.Node], given: fx.Node, weight: fx.Node, bias: fx.Node) -> tuple[fx.Node, ...]:
    hidden, cell = state
    gates = body.sum(given, body.product(hidden, weight))
    enter, forget, candidate, leave = body.parts(gates, 4)
    kept = body.call(aten.mul.Tensor, body.sigmoid(forget), cell)
    entered = body.call(aten.mul.Tensor, body.sigmoid(enter), body.call(aten.tanh.default, candidate))
    cell = body.sum(kept, entered)
    return body.call(aten.mul.Tensor, body.sigmoid(leave), body.call(aten.tanh.default, cell)), cell


def _gru(body: Body, state: Sequence[fx.Node], given: fx.Node, weight: fx.Node, bias: fx.Node) -> tuple[fx.Node, ...]:
    (hidden,) = state
    reset, update, candidate = body.parts(given, 3)
    own = body.parts(body.sum(body.product(hidden, weight), bias), 3)
    kept = body.sigmoid(body.sum(update, own[1]))
    weighed = body.call(aten.mul.Tensor, body.sigmoid(body.sum(reset, own[0])), own[2])
    new = body.call(aten.tanh.default, body.sum(candidate, weighed))
    rest = body.call(aten.mul.Tensor, kept, body.call(aten.sub.Tensor, hidden, new))
    return (body.sum(new, rest),)


def _rnn(activation: Any) -> Step:
    def step(
        body: Body, state: Sequence[fx.Node], given: fx.Node, weight: fx.Node, bias: fx.Node
    ) -> tuple[fx.Node, ...]:
        return (body.call(activation, body.sum(given, body.product(state[0], weight))),)

    return step


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent layer."""

    step: Step
    states: int = 1
    """Number of tensors in its state."""
    own_bias: bool = False
    """True if each step adds the bias of the state's product; else the product with the input includes it."""


CELLS: dict[str, Cell] = {
    "lstm": Cell(_lstm, states=2),
    "gru": Cell(_gru, own_bias=True),
    "rnn_tanh": Cell(_rnn(aten.tanh.default)),
    "rnn_relu": Cell(_rnn(aten.relu.default)),
}
"""By the name of the op."""


# -- a layer -------------------------------------------------------------------------------------------------------


def why_not_loop(node: fx.Node) -> str | None:
    """The reason why a recurrent layer cannot be written as a loop."""
    if argument(node, "train"):
        return "it is in training"
    params, hx = argument(node, "params"), argument(node, "hx")
    sets = int(argument(node, "num_layers")) * (2 if argument(node, "bidirectional") else 1)
    if len(params) != sets * _each(node):
        return "it projects its state"
    states = hx if isinstance(hx, list | tuple) else [hx]
    if any(tensor_type(value) is None for value in (argument(node, "x"), *params, *states)):
        return "types of what it reads are unknown; capture with example inputs"
    if not all(_place(user) is not None for user in node.users):
        return "its results are read together"
    return None


def _each(node: fx.Node) -> int:
    """Number of parameters of a layer in each direction."""
    return 4 if argument(node, "has_biases") else 2


def _place(user: fx.Node) -> int | None:
    """The index of the result that a node takes."""
    place = user.args[1] if user.target is operator.getitem else None
    return place if isinstance(place, int) else None


@dataclass(eq=False)
class Unrolled:
    """One recurrent node, and the op that it is."""

    program: Program
    node: fx.Node
    cell: Cell
    state: TensorType
    """The type of a state of one layer and direction."""
    steps: int | str
    step: str = ""
    """The name of the graph of one step, once it is there."""

    @staticmethod
    def of(program: Program, node: fx.Node) -> Unrolled:
        x, weight = known_type(argument(node, "x")), known_type(argument(node, "params")[1])
        steps, count = x.shape[:2]
        if argument(node, "batch_first"):
            steps, count = count, steps
        return Unrolled(program, node, CELLS[op_name(node)], TensorType(x.dtype, (count, weight.shape[1])), steps)

    def write(self) -> None:
        node, program = self.node, self.program
        params, hx = argument(node, "params"), argument(node, "hx")
        states = list(hx) if isinstance(hx, list | tuple) else [hx]
        directions = 2 if argument(node, "bidirectional") else 1
        is_turned = bool(argument(node, "batch_first"))
        each = _each(node)
        y, ends = argument(node, "x"), list[Sequence[fx.Node]]()
        for layer in range(int(argument(node, "num_layers"))):
            # input GEMMs come first: they read the quantized tensors directly
            made = []
            for direction in range(directions):
                place = layer * directions + direction
                own = params[place * each : (place + 1) * each]
                start = [self.call(aten.select.int, state, 0, place, kind=self.state) for state in states]
                given = self.given(y, own)
                given = self.turned(given) if is_turned and layer == 0 else given
                *end, out = self.loop(self.flipped(given) if direction else given, start, own)
                made.append(self.flipped(out) if direction else out)
                ends.append(end)
            y = self.joined(made) if directions > 1 else made[0]
        read: dict[int, list[fx.Node]] = {}
        for user in node.users:
            read.setdefault(_place(user) or 0, []).append(user)
        for place, users in sorted(read.items()):
            made_of = [end[place - 1] for end in ends]
            result = self.stacked(made_of) if place else self.turned(y) if is_turned else y
            for user in users:
                program.replace(user, result)
        program.erase(node)

    # -- what it is made of --------------------------------------------------------------------------------------------

    def call(self, target: Any, *args: Any, kind: ValueType, **kwargs: Any) -> fx.Node:
        made = self.program.emit(target, args, kwargs, before=self.node, value=kind)
        self.program.plan.made_for[made] = self.node.name
        return made

    def given(self, y: fx.Node, params: Sequence[fx.Node]) -> fx.Node:
        """Input GEMMs with their biases, for all steps."""
        source, weight = known_type(y), known_type(params[0])
        kind = TensorType(self.state.dtype, (*source.shape[:-1], weight.shape[0]))
        product = self.call(aten.linear.default, y, params[0], kind=kind)
        if len(params) == 2:
            return product
        bias = params[2]
        if not self.cell.own_bias:
            bias = self.call(aten.add.Tensor, bias, params[3], kind=known_type(bias))
        return self.call(aten.add.Tensor, product, bias, kind=kind)

    def loop(self, given: fx.Node, start: list[fx.Node], params: Sequence[fx.Node]) -> list[fx.Node]:
        """The state at the end, and the results of all steps."""
        across = known_type(params[1])
        turned = TensorType(across.dtype, across.shape[::-1])
        weight = self.call(aten.t.default, params[1], kind=turned)
        weight = self.call(aten.contiguous.default, weight, kind=turned)  # once, and not in each step
        more = [weight]
        if self.cell.own_bias:
            more.append(params[3] if len(params) > 2 else self.zeros(across))
        made = TensorType(self.state.dtype, (self.steps, *self.state.shape))
        kinds = (*(self.state for _ in start), made)
        if not self.step:
            body = self.body(known_type(given), [known_type(value) for value in more])
            self.step = str(body.target)
        else:
            body = self.program.read(self.step, before=self.node)
        scan = self.call(torch.ops.higher_order.scan, body, start, [given], tuple(more), kind=TupleType(kinds))
        return [self.call(operator.getitem, scan, place, kind=kind) for place, kind in enumerate(kinds)]

    def zeros(self, across: TensorType) -> fx.Node:
        """The bias of a layer that has none."""
        zeros = torch.zeros(int(across.shape[0]), dtype=across.dtype)
        return self.program.constant(f"{self.node.name}_zeros", zeros, before=self.node)

    def body(self, given: TensorType, more: Sequence[TensorType]) -> fx.Node:
        """The graph of one step."""
        body = Body(self.state)
        states = [body.input(f"state_{place}", self.state) for place in range(self.cell.states)]
        row = body.input("given", TensorType(given.dtype, given.shape[1:]))
        weight, *bias = [body.input(name, kind) for name, kind in zip(("weight", "bias"), more, strict=False)]
        new = self.cell.step(body, states, row, weight, bias[0] if bias else weight)
        result = body.call(aten.clone.default, new[0])  # what a loop returns twice must not be one tensor
        body.graph.output((*new, result))
        for node in body.graph.nodes:
            if node.op == "call_function":
                self.program.plan.made_for[node] = self.node.name
        return self.program.subgraph(f"{self.node.name}_step", body.graph, before=self.node)

    def turned(self, x: fx.Node) -> fx.Node:
        """Steps and sequences exchanged."""
        kind = known_type(x)
        first, second, *rest = kind.shape
        return self.call(aten.transpose.int, x, 0, 1, kind=TensorType(kind.dtype, (second, first, *rest)))

    def flipped(self, x: fx.Node) -> fx.Node:
        return self.call(aten.flip.default, x, [0], kind=known_type(x))

    def joined(self, parts: Sequence[fx.Node]) -> fx.Node:
        """The results of both directions, side by side."""
        *lead, width = known_type(parts[0]).shape
        kind = TensorType(self.state.dtype, (*lead, int(width) * len(parts)))
        return self.call(aten.cat.default, list(parts), -1, kind=kind)

    def stacked(self, parts: Sequence[fx.Node]) -> fx.Node:
        """The states at the end of all layers and directions."""
        kind = TensorType(self.state.dtype, (len(parts), *self.state.shape))
        return self.call(aten.stack.default, list(parts), kind=kind)
