"""ONNX writers of recurrent layers: one LSTM, GRU or RNN node per layer; cells by their formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantc.targets.onnx.op_writers import OpCall, Value, writes
from quantc.targets.onnx.write_products import transposed_weight


@dataclass(frozen=True)
class OnnxCell:
    """A kind of layer: its ONNX op, and ONNX's position of each of torch's gates."""

    op: str
    gates: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...] = ()


KINDS = {
    "lstm": OnnxCell("LSTM", (0, 3, 1, 2)),  # torch: i f g o; ONNX: i o f c
    "gru": OnnxCell("GRU", (1, 0, 2), (("linear_before_reset", 1),)),  # torch: r z n; ONNX: z r h
    "rnn_tanh": OnnxCell("RNN", (0,)),
    "rnn_relu": OnnxCell("RNN", (0,)),
}


def _onnx_weight(call: OpCall, node: Any, kind: OnnxCell) -> str:
    """A weight or bias with its gates in the order of ONNX, and an axis for the direction."""
    tensor = call.translation.program.tensor(node)
    weight = call.translation.stored(node)
    if weight is not None and weight.kind is not None and weight.group is None and weight.axis in (0, None):
        moved = replace(
            weight,
            name=f"{weight.name}_ordered",
            levels=_gates(weight.levels, kind),
            scale=_per_row(weight.scale, kind),
            zero_point=_per_row(weight.zero_point, kind),
        )
        made = call.write_for_float(moved)
    elif tensor is not None:
        made = call.writer.constant(_gates(tensor.detach(), kind), f"{node.target}_ordered")
    else:
        made = _reorder_gates(call, call.read(node), kind)
    return call.emit("Unsqueeze", made, call.writer.numbers([0]))


def _reorder_gates(call: OpCall, rows: str, kind: OnnxCell) -> str:
    """The gates of what is computed."""
    count = len(kind.gates)
    if count == 1:
        return rows
    parts = call.many("Split", [rows], count, axis=0, num_outputs=count)
    return call.emit("Concat", *(parts[gate] for gate in kind.gates), axis=0)


def _gates(rows: Tensor, kind: OnnxCell) -> Tensor:
    parts = rows.chunk(len(kind.gates), 0)
    return torch.cat([parts[gate] for gate in kind.gates], 0)


def _per_row(values: Tensor | None, kind: OnnxCell) -> Tensor | None:
    return values if values is None or not values.dim() else _gates(values, kind)


@dataclass(frozen=True, eq=False)
class OnnxLayer:
    """One layer, all directions."""

    call: OpCall
    kind: OnnxCell
    params: Sequence[Sequence[Any]]
    """For each direction: weights and biases."""

    def joined(self, place: int) -> str:
        """Parameter `place` of all directions, concatenated."""
        parts = [_onnx_weight(self.call, direction[place], self.kind) for direction in self.params]
        return self.call.emit("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def biases(self) -> str:
        return self.call.emit("Concat", self.joined(2), self.joined(3), axis=1)

    def run(self, x: str, states: Sequence[str], has_biases: bool, **attributes: Any) -> tuple[str, tuple[str, ...]]:
        """Outputs of all steps, and final states."""
        call, count = self.call, len(self.params)
        inputs = [x, self.joined(0), self.joined(1), self.biases() if has_biases else "", "", *states]
        w_hh = self.params[0][1]
        hidden = int(call.type(w_hh).shape[-1])
        direction = "bidirectional" if count == 2 else "forward"
        made = call.many(
            self.kind.op,
            inputs,
            1 + len(states),
            hidden_size=hidden,
            direction=direction,
            **dict(self.kind.attributes),
            **attributes,
        )
        steps = call.emit("Transpose", made[0], perm=[0, 2, 1, 3])  # steps, directions, batch, hidden
        return call.emit("Reshape", steps, call.writer.numbers([0, 0, -1])), made[1:]


@writes("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: OpCall) -> Value:
    name = str(call.node.target).split(".")[1]
    kind = KINDS[name]
    if call["train"] and float(call["dropout"]):
        raise call.refuse(f"{call.node.name} drops values")
    if call.rank() != 3:
        raise call.refuse(f"{call.node.name} reads a lone sequence: give it a batch")
    directions = 2 if call["bidirectional"] else 1
    has_biases = bool(call["has_biases"])
    width = 4 if has_biases else 2
    params = list(call["params"])
    if len(params) != int(call["num_layers"]) * directions * width:
        raise call.refuse(f"{call.node.name} has a projection")
    x = call.tensor("x")
    if call["batch_first"]:
        x = call.emit("Transpose", x, perm=[1, 0, 2])
    given = call["hx"] if name == "lstm" else [call["hx"]]
    states = [call.read(each) for each in given]
    last: list[list[str]] = [[] for _ in states]
    extra = {"activations": ["Relu"] * directions} if name == "rnn_relu" else {}
    for index in range(int(call["num_layers"])):
        start = index * directions * width
        own = [params[start + side * width : start + (side + 1) * width] for side in range(directions)]
        begun = [_layer_of(call, state, index, directions) for state in states]
        x, ended = OnnxLayer(call, kind, own).run(x, begun, has_biases, **extra)
        for kept, end in zip(last, ended, strict=True):
            kept.append(end)
    if call["batch_first"]:
        x = call.emit("Transpose", x, perm=[1, 0, 2])
    return (x, *(call.emit("Concat", *kept, axis=0) if len(kept) > 1 else kept[0] for kept in last))


def _layer_of(call: OpCall, state: str, index: int, directions: int) -> str:
    ends = [index * directions, (index + 1) * directions]
    return call.emit("Slice", state, *(call.writer.numbers([each]) for each in (*ends, 0)))


# -- cells ---------------------------------------------------------------------------------------------------------


def _gate_sums(call: OpCall, state: Any, prefix: str, x: Any) -> str:
    """x wᵀ + b."""
    product = call.emit("MatMul", call.read(x), transposed_weight(call, call[f"w_{prefix}"]))
    bias = call[f"b_{prefix}"]
    return product if bias is None else call.emit("Add", product, call.read(bias))


def _sums(call: OpCall, state: Any) -> tuple[str, str]:
    return _gate_sums(call, state, "ih", call["x"]), _gate_sums(call, state, "hh", state)


@writes("rnn_tanh_cell", "rnn_relu_cell")
def rnn_cell(call: OpCall) -> Value:
    both = call.emit("Add", *_sums(call, call["hx"]))
    return call.emit("Tanh" if "tanh" in str(call.node.target) else "Relu", both)


@writes("lstm_cell")
def lstm_cell(call: OpCall) -> Value:
    hidden, cell = call["hx"]
    both = call.emit("Add", *_sums(call, hidden))
    entry, forget, new, out = call.many("Split", [both], 4, axis=1, num_outputs=4)
    kept = call.emit("Mul", call.emit("Sigmoid", forget), call.read(cell))
    added = call.emit("Mul", call.emit("Sigmoid", entry), call.emit("Tanh", new))
    state = call.emit("Add", kept, added)
    return call.emit("Mul", call.emit("Sigmoid", out), call.emit("Tanh", state)), state


@writes("gru_cell")
def gru_cell(call: OpCall) -> Value:
    state = call["hx"]
    left, right = (call.many("Split", [each], 3, axis=1, num_outputs=3) for each in _sums(call, state))
    reset, update = (call.emit("Sigmoid", call.emit("Add", left[at], right[at])) for at in (0, 1))
    new = call.emit("Tanh", call.emit("Add", left[2], call.emit("Mul", reset, right[2])))
    one = call.writer.scalar(1.0, call.result.dtype)
    kept = call.emit("Mul", update, call.read(state))
    return call.emit("Add", call.emit("Mul", call.emit("Sub", one, update), new), kept)
