"""Weight-only LSTM and GRU layers whose weights are exact in float16: fp16, and groups with scales of few bits.

fbgemm multiplies float32 inputs by float16 weights and accumulates in float32, so each step reads half the memory. That
pays off where a layer's weights do not fit the cache: measured 1.2 to 6 times as fast as float on one thread. Small
layers are faster in float, on torch's own op; so are weights with a scale per row, which torch's sequence op does not
support.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.integer.ops.recurrent import Layout
from quantc.targets.kernels.fp16_weights import exact_halves
from quantc.targets.kernels.kernel import Kernel, check_columns
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernel
from quantc.targets.kernels.packing import gru_dynamic, has_halves, lstm_dynamic, packed_half_cell
from quantc.targets.kernels.stored_weight import StoredWeight, WeightOnly
from quantc.targets.kernels.weight_only_kernels import FloatWeight

SEQUENCES = {"lstm": lstm_dynamic, "gru": gru_dynamic}
MIN_WEIGHTS = 400_000
"""Of the state of one layer. With fewer, float is as fast or faster."""


class HalfSequences(Kernel):
    """All layers over a sequence, with exact float16 weights."""

    name: ClassVar[str] = "fbgemm float16 layers over sequences"

    def __init__(self, kind: str, layout: Layout, weights: list[StoredWeight], biases: list[Tensor]) -> None:
        super().__init__()
        self.kind = kind
        self.layout = layout
        self.columns = tuple(weight.inputs for weight in weights[:2])
        self.stored = torch.nn.ModuleList(FloatWeight(weight) for weight in weights)
        self.has_biases = bool(biases)
        for index, bias in enumerate(biases):
            self.register_buffer(f"bias_{index}", bias)

    def pack(self) -> Any:
        matrices = [exact_halves(held.stored) for held in self.stored if isinstance(held, FloatWeight)]
        exact = [halves.matrix for halves in matrices if halves is not None and halves.factor is None]
        if len(exact) < len(matrices):
            raise ValueError("the weights that were loaded are not exact in float16: lower the program again")
        count = range(len(exact))
        biases = [self.get_buffer(f"bias_{index}") if self.has_biases else None for index in count]
        pairs = list(zip(exact, biases, strict=True))
        return [packed_half_cell(pairs[index], pairs[index + 1]) for index in count[::2]]

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, *state = inputs
        check_columns(x, self.columns[0], self.name)
        check_columns(state[0], self.columns[1], self.name)
        layout = (self.layout.num_layers, self.layout.bidirectional, self.layout.batch_first)
        sequence, *last = SEQUENCES[self.kind](x, state, packed, *layout)
        return sequence.contiguous(), *last


@kernel("x86", *SEQUENCES)
def fbgemm(call: Call) -> Placement:
    params: list[fx.Node] = list(call["params"])
    group = 4 if call["has_biases"] else 2
    layout = Layout(call["num_layers"], call["bidirectional"], call["batch_first"])
    if len(params) != group * layout.num_layers * layout.directions:
        raise NoKernelError("it projects its state (proj_size)")
    if call["train"] and call["dropout"]:
        raise NoKernelError("it drops parts of what goes from layer to layer, as in training")
    places = range(0, len(params), group)
    weights = [_stored_weight(call, params[start + index]) for start in places for index in (0, 1)]
    if not has_halves():
        raise NoKernelError("this build of torch cannot multiply with float16 weights")
    if min(weight.outputs * weight.inputs for weight in weights[1::2]) < MIN_WEIGHTS:
        raise NoKernelError(f"with less than {MIN_WEIGHTS} weights of the state float is faster")
    for weight in weights:
        halves = exact_halves(weight)
        if halves is None or halves.factor is not None:
            raise NoKernelError("float16 does not hold its weights exactly without a scale for each row")
    biases = [call.program.tensor(params[start + index]) for start in places for index in range(2, group)]
    known = [bias.detach() for bias in biases if bias is not None]
    if len(known) < len(biases):
        raise NoKernelError("its biases are not constants")
    x, hx = call.node.args[:2]
    listed = (x, *(hx if isinstance(hx, list | tuple) else (hx,)))
    inputs = tuple(value for value in listed if isinstance(value, fx.Node))
    return Placement(HalfSequences(call.op, layout, weights, known), inputs)


def _stored_weight(call: Call, node: fx.Node) -> StoredWeight:
    """A weight as it is stored; it has been given a kernel of its own before."""
    owner = call.program.owner(node.graph)
    found = owner.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(found, WeightOnly):
        raise NoKernelError("its weights are not stored for it to compute in float")
    return found.stored
