"""Recurrent layers with run-time scales: fbgemm's products on x86, QNNPACK's elsewhere.

torch goes through the steps of an LSTM or GRU itself; for others, and for cells on 8 bits, the steps of the integer form are
gone through with packed products in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.integer.library import OPS
from quantc.integer.ops.recurrent import KINDS, Layout, Product, unrolled
from quantc.kernels.engines import UNUSED, gru_dynamic, lstm_dynamic, packed_cell, packed_linear
from quantc.kernels.packed import Kernel
from quantc.kernels.table import Call, NoKernelError, Placement, kernel

REDUCED, FULL = 127, 255
"""The largest level of an activation, where sums of two products must fit 16 bits and where they need not."""
RANGES = {"fbgemm": (REDUCED, FULL), "qnnpack": (FULL,)}
"""What the kernels of an engine quantize to: 0 up to one of these."""
SEQUENCES: dict[str, Callable[..., Any]] = {"lstm": lstm_dynamic, "gru": gru_dynamic}
"""Those that torch takes through all steps itself."""
CELLS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.ops.quantized, f"quantized_{name}_cell_dynamic").default for name in KINDS
}
"""torch's ops for one step. They always quantize to 0..127."""


class Recurrent(Kernel):
    """What layers and cells share: weights, scales and biases, in the order of the op, and how far levels go."""

    def __init__(self, kind: str, engine: str, tensors: dict[str, list[Tensor]], grid: tuple[Any, ...]) -> None:
        super().__init__()
        self.kind = kind
        self.engine = engine
        self.grid = grid
        """The last arguments of the op of the integer form."""
        self.reduced = grid[3] == REDUCED
        for name, values in tensors.items():
            for index, value in enumerate(values):
                self.register_buffer(f"{name}_{index}", value)
        self.counts = {name: len(values) for name, values in tensors.items()}

    def tensors(self, name: str) -> list[Tensor]:
        return [self.get_buffer(f"{name}_{index}") for index in range(self.counts[name])]

    def packed_weights(self) -> list[Any]:
        weights, scales = self.tensors("weights"), self.tensors("scales")
        biases = self.tensors("biases") or [None] * len(weights)
        return [packed_linear(self.engine, *each) for each in zip(weights, scales, biases, strict=True)]

    def product(self, weight: Any) -> Product:
        multiply, reduced = torch.ops.quantized.linear_dynamic.default, self.reduced
        return lambda x: multiply(x, weight, reduced)


class Layers(Recurrent):
    """All layers of an LSTM, GRU or RNN over a whole sequence."""

    name: ClassVar[str] = "recurrent_dynamic"

    def __init__(
        self, kind: str, engine: str, layout: Layout, tensors: dict[str, list[Tensor]], grid: tuple[Any, ...]
    ) -> None:
        super().__init__(kind, engine, tensors, grid)
        self.layout = layout

    def pack(self) -> Any:
        weights = self.packed_weights()
        pairs = list(zip(weights[::2], weights[1::2], strict=True))
        if self.kind not in SEQUENCES:
            return [(self.product(ih), self.product(hh)) for ih, hh in pairs]
        return [packed_cell(ih, hh, self.reduced) for ih, hh in pairs]

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, *state = inputs
        if not _is_finite(*inputs):
            return self._as_written(x, state)
        result = self._on_kernel(packed, x, state)
        # a bias that is not finite, or a state that has grown beyond all bounds
        return result if _is_finite(result[0]) else self._as_written(x, state)

    def _on_kernel(self, packed: Any, x: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
        layout = self.layout
        if self.kind not in SEQUENCES:
            return unrolled(KINDS[self.kind], layout, x, state, packed)
        sequence, *last = SEQUENCES[self.kind](x, state, packed, *_stacked(layout))
        return sequence.contiguous(), *last

    def _as_written(self, x: Tensor, state: list[Tensor]) -> Any:
        """What is not finite, kernels would hide: the integer form shows it."""
        hx = state if KINDS[self.kind].states > 1 else state[0]
        parts = (self.tensors("weights"), self.tensors("scales"), self.tensors("biases"))
        return OPS[f"{self.kind}_dynamic"].target(x, hx, *parts, *_stacked(self.layout), *self.grid)


class Cell(Recurrent):
    """One step of an LSTM, GRU or RNN."""

    name: ClassVar[str] = "recurrent_cell_dynamic"

    def pack(self) -> Any:
        return self.packed_weights()

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, *state = inputs
        kind = KINDS[self.kind]
        hx = state if kind.states > 1 else state[0]
        if not _is_finite(x, state[0]):
            return self._as_written(x, hx)
        if self.reduced:
            return CELLS[self.kind](x, hx, *packed, UNUSED, UNUSED)
        ih, hh = packed
        made = kind.step(self.product(ih)(x), tuple(state), self.product(hh))
        return made if kind.states > 1 else made[0]

    def _as_written(self, x: Tensor, hx: Any) -> Any:
        biases = self.tensors("biases") or [None, None]
        parts = (*self.tensors("weights"), *self.tensors("scales"), *biases)
        return OPS[f"{self.kind}_cell_dynamic"].target(x, hx, *parts, *self.grid)


def _is_finite(*tensors: Tensor) -> bool:
    """Whether there is neither NaN nor infinity in tensors; a sum that is too large counts as infinity."""
    return all(math.isfinite(tensor.sum().item()) for tensor in tensors)


def _stacked(layout: Layout) -> tuple[int, bool, bool]:
    return layout.num_layers, layout.bidirectional, layout.batch_first


# -- makers --------------------------------------------------------------------------------------------------------


def _grid(engine: str, call: Call) -> tuple[Any, ...]:
    if call["per_token"] or call["x_zero_point"] is not None:
        raise NoKernelError("its scales are not those of a whole affine tensor")
    ranges = RANGES[engine]
    if call["dtype"] is not torch.uint8 or call["qmin"] != 0 or call["qmax"] not in ranges:
        known = " or ".join(f"0..{high}" for high in ranges)
        raise NoKernelError(f"the kernel quantizes to {known}, not to {call['qmin']}..{call['qmax']}")
    return tuple(call[name] for name in ("per_token", "x_zero_point", "qmin", "qmax", "dtype", "eps"))


def _constants(call: Call, nodes: Any, what: str) -> list[Tensor]:
    """The tensors of a list of nodes, or of single ones that the call has found already."""
    found: list[Tensor] = []
    for value in nodes:
        tensor = call.program.tensor(value) if isinstance(value, fx.Node) else value
        if tensor is None:
            raise NoKernelError(f"one of its {what} is not a constant")
        found.append(tensor.detach())
    return found


def _inputs(call: Call) -> tuple[fx.Node, ...]:
    """The nodes of the input and of the state, which may be constants too."""
    x, hx = call.node.args[:2]
    listed = hx if isinstance(hx, list | tuple) else (hx,)
    return (x, *listed)  # type: ignore[return-value]


def _layers(engine: str, call: Call) -> Placement:
    grid = _grid(engine, call)
    tensors = {name: _constants(call, call[name], name) for name in ("weights", "scales", "biases")}
    layout = Layout(call["num_layers"], call["bidirectional"], call["batch_first"])
    made = Layers(call.op.removesuffix("_dynamic"), engine, layout, tensors, grid)
    return Placement(made, _inputs(call))


def _cell(engine: str, call: Call) -> Placement:
    grid = _grid(engine, call)
    names = {"weights": ("w_ih", "w_hh"), "scales": ("ih_scale", "hh_scale"), "biases": ("b_ih", "b_hh")}
    given = {what: [call[name] for name in each if call[name] is not None] for what, each in names.items()}
    if len(given["biases"]) == 1:
        raise NoKernelError("it has one bias of two")
    tensors = {what: _constants(call, values, what) for what, values in given.items()}
    return Placement(Cell(call.op.removesuffix("_cell_dynamic"), engine, tensors, grid), _inputs(call))


LAYERS = tuple(f"{name}_dynamic" for name in KINDS)
STEPS = tuple(f"{name}_cell_dynamic" for name in KINDS)


@kernel("x86", *LAYERS)
def fbgemm_layers(call: Call) -> Placement:
    return _layers("fbgemm", call)


@kernel("x86", *STEPS)
def fbgemm_cell(call: Call) -> Placement:
    return _cell("fbgemm", call)


@kernel("qnnpack", *LAYERS)
def qnnpack_layers(call: Call) -> Placement:
    return _layers("qnnpack", call)


@kernel("qnnpack", *STEPS)
def qnnpack_cell(call: Call) -> Placement:
    return _cell("qnnpack", call)
