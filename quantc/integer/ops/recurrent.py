"""Dynamically quantized recurrent layers.

Every GEMM is a `linear_dynamic`: of a layer's whole input sequence at once, and of the hidden state at each step. Sums
are exact integers; gates are float32. This is what kernels compute, so state and inner layers are quantized here, which
the Q/DQ form does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantc.errors import DataError, RefusedError
from quantc.integer.library import OPS, integer_op
from quantc.integer.ops import dynamic
from quantc.spec.aten_arithmetic import aten

Product = Callable[[Tensor], Tensor]
"""Multiplies what it is given with a weight it knows."""
State = tuple[Tensor, ...]
"""Of one layer in one direction: h, and in an LSTM c."""
Step = Callable[[Tensor, State, Product], State]
"""From what the input gives to the gates, the state before, and the weight of the state: the state after."""

GRID = "bool per_token, int? x_zero_point, int qmin, int qmax, ScalarType dtype, float eps"
LAYERS = (
    f"Tensor[] weights, Tensor[] scales, Tensor[] biases, int num_layers, bool bidirectional, bool batch_first, {GRID}"
)
CELL = f"Tensor w_ih, Tensor w_hh, Tensor ih_scale, Tensor hh_scale, Tensor? b_ih, Tensor? b_hh, {GRID}"


# -- one step ------------------------------------------------------------------------------------------------------


def _lstm(given: Tensor, state: State, product: Product) -> State:
    h, c = state
    into, forget, cell, out = aten.chunk.default(aten.add.Tensor(product(h), given), 4, -1)
    kept = aten.mul.Tensor(aten.sigmoid.default(forget), c)
    c = aten.add.Tensor(kept, aten.mul.Tensor(aten.sigmoid.default(into), aten.tanh.default(cell)))
    return aten.mul.Tensor(aten.sigmoid.default(out), aten.tanh.default(c)), c


def _gru(given: Tensor, state: State, product: Product) -> State:
    (h,) = state
    reset_x, update_x, new_x = aten.chunk.default(given, 3, -1)
    reset_h, update_h, new_h = aten.chunk.default(product(h), 3, -1)
    reset = aten.sigmoid.default(aten.add.Tensor(reset_h, reset_x))
    update = aten.sigmoid.default(aten.add.Tensor(update_h, update_x))
    new = aten.tanh.default(aten.add.Tensor(new_x, aten.mul.Tensor(new_h, reset)))
    return (aten.add.Tensor(aten.mul.Tensor(aten.sub.Tensor(h, new), update), new),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(given: Tensor, state: State, product: Product) -> State:
        return (activation(aten.add.Tensor(product(state[0]), given)),)

    return step


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer, by op name."""

    step: Step
    states: int
    formula: str
    """One step in terms of `u`, the projected input, and `v`, the projected state; each gate is a slice of both."""


KINDS: dict[str, Kind] = {
    "lstm": Kind(_lstm, 2, "i, f, o = σ(u + v), g = tanh(u + v); c = f·c + i·g; h = o·tanh(c)"),
    "gru": Kind(_gru, 1, "r, z = σ(u + v); n = tanh(u + r·v); h = (h − n)·z + n"),
    "rnn_tanh": Kind(_rnn(aten.tanh.default), 1, "h = tanh(u + v)"),
    "rnn_relu": Kind(_rnn(aten.relu.default), 1, "h = relu(u + v)"),
}


# -- all steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Stacking of an op's layers, and the axis order of its input."""

    num_layers: int
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1


def unroll(
    kind: Kind, layout: Layout, x: Tensor, hx: Sequence[Tensor], products: Sequence[tuple[Product, Product]]
) -> tuple[Tensor, ...]:
    """The op, step by step: outputs, then final state.

    `products` are the GEMMs of input and state, by layer and direction.
    """
    values = aten.transpose.int(x, 0, 1) if layout.batch_first else x
    if isinstance(values.shape[0], torch.SymInt):
        raise RefusedError(
            "the number of steps is not known, so a recurrent layer cannot be written out step by step",
            advice="capture with a fixed length of sequences, or convert with style='fused'",
        )
    last: list[State] = []
    for _ in range(layout.num_layers):
        made: list[Tensor] = []
        for direction in range(layout.directions):
            state = tuple(aten.select.int(part, 0, len(last)) for part in hx)
            sequence, state = _one_way(kind.step, values, state, products[len(last)], direction == 1)
            made.append(sequence)
            last.append(state)
        values = made[0] if len(made) == 1 else aten.cat.default(made, -1)
    finals = tuple(aten.stack.default([state[part] for state in last]) for part in range(kind.states))
    return (aten.contiguous.default(aten.transpose.int(values, 0, 1)) if layout.batch_first else values, *finals)


def _one_way(
    step: Step, values: Tensor, state: State, products: tuple[Product, Product], reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction. The whole sequence is quantized at once, the state at each step."""
    if values.shape[0] == 0:
        raise DataError("a sequence of no steps", where="a recurrent layer", advice="give at least one step")
    given = aten.unbind.int(products[0](values), 0)
    made: list[Tensor] = []
    for part in given[::-1] if reverse else given:
        state = step(part, state, products[1])
        made.append(state[0])
    return aten.stack.default(made[::-1] if reverse else made), state


# -- the ops -------------------------------------------------------------------------------------------------------


def _exact(w: Tensor, scale: Tensor, bias: Tensor | None, grid: tuple[Any, ...]) -> Product:
    return lambda x: dynamic.linear_dynamic(x, w, None, scale, bias, *grid)


def _fast(w: Tensor, scale: Tensor, bias: Tensor | None, grid: tuple[Any, ...]) -> Product:
    """The same bits. The weight is made float64, in which the sums are, once and not at every step."""
    wide, kernel = w.double(), OPS["linear_dynamic"].kernel or dynamic.linear_dynamic
    return lambda x: kernel(x, wide, None, scale, bias, *grid)


Maker = Callable[[Tensor, Tensor, Tensor | None, tuple[Any, ...]], Product]


def _layers(kind: Kind, make: Maker) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        x: Tensor,
        hx: Any,
        weights: Sequence[Tensor],
        scales: Sequence[Tensor],
        biases: Sequence[Tensor],
        num_layers: int,
        bidirectional: bool,
        batch_first: bool,
        *grid: Any,
    ) -> tuple[Tensor, ...]:
        added: Sequence[Tensor | None] = biases or [None] * len(weights)
        each = [make(w, scale, bias, grid) for w, scale, bias in zip(weights, scales, added, strict=True)]
        pairs = list(zip(each[::2], each[1::2], strict=True))
        layout = Layout(num_layers, bidirectional, batch_first)
        return unroll(kind, layout, x, _as_list(hx), pairs)

    return run


def _shapes(kind: Kind) -> Callable[..., tuple[Tensor, ...]]:
    """Shapes of the results: running all steps for them would take long."""

    def fake(x: Tensor, hx: Any, *rest: Any) -> tuple[Tensor, ...]:
        directions = 2 if rest[4] else 1
        state = _as_list(hx)[0]
        outcome = x.new_empty([*x.shape[:-1], directions * state.shape[-1]])
        return (outcome, *(part.new_empty(part.shape) for part in _as_list(hx)))

    return fake


def _cell(kind: Kind, make: Maker) -> Callable[..., Any]:
    def run(
        x: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        ih_scale: Tensor,
        hh_scale: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        *grid: Any,
    ) -> Any:
        given = make(w_ih, ih_scale, b_ih, grid)(x)
        state = kind.step(given, _as_list(hx), make(w_hh, hh_scale, b_hh, grid))
        return state if kind.states > 1 else state[0]

    return run


def _as_list(hx: Any) -> State:
    """The state, which is a list only where it has two parts."""
    return tuple(hx) if isinstance(hx, list | tuple) else (hx,)


PRODUCTS = "u = linear_dynamic(x, w_ih, b_ih), of {of}; v = linear_dynamic(h, w_hh, b_hh), at each step"


def _define() -> None:
    for name, kind in KINDS.items():
        hx = "Tensor[] hx" if kind.states > 1 else "Tensor hx"
        parts = ", ".join(["Tensor"] * kind.states)
        formula = f"{PRODUCTS.format(of='all steps at once')}; {kind.formula}, in float32"
        reference = _layers(kind, _exact)
        reference.__doc__ = f"`{name}` on integers: each layer's input is quantized as a whole, h at each step."
        schema = f"{name}_dynamic(Tensor x, {hx}, {LAYERS}) -> (Tensor, {parts})"
        integer_op(schema, formula=formula, kernel=_layers(kind, _fast), fake=_shapes(kind))(reference)
        cell = _cell(kind, _exact)
        cell.__doc__ = f"One step of `{name}` on integers: input and state are quantized as they come."
        outcome = f"({parts})" if kind.states > 1 else parts
        formula = f"{PRODUCTS.format(of='the input')}; {kind.formula}, in float32"
        schema = f"{name}_cell_dynamic(Tensor x, {hx}, {CELL}) -> {outcome}"
        integer_op(schema, formula=formula, kernel=_cell(kind, _fast))(cell)


_define()
