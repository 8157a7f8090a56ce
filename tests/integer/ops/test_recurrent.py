"""Recurrent layers with run-time scales: each step against NumPy, and how layers, directions and cells come together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from quantc.errors import DataError, RefusedError
from quantc.integer.library import OPS
from quantc.integer.semantics import load

load()

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
KINDS = tuple(GATES)
EPS = 2.0**-14
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Op:
    """The arguments of a recurrent op, drawn from a seed."""

    kind: str
    x: Tensor
    states: list[Tensor]
    weights: list[Tensor]
    scales: list[Tensor]
    biases: list[Tensor]
    layers: int = 1
    both: bool = False
    per_token: bool = False
    qmax: int = 127

    @property
    def grid(self) -> tuple[Any, ...]:
        return self.per_token, None, 0, self.qmax, torch.uint8, EPS

    def hx(self, states: list[Tensor]) -> Any:
        return states if self.kind == "lstm" else states[0]

    def run(self, x: Tensor | None = None, batch_first: bool = False) -> tuple[Tensor, ...]:
        parts = (self.weights, self.scales, self.biases)
        x = self.x if x is None else x
        target = OPS[f"{self.kind}_dynamic"].target
        result: tuple[Tensor, ...] = target(
            x, self.hx(self.states), *parts, self.layers, self.both, batch_first, *self.grid
        )
        return result


def drawn(
    kind: str,
    sizes: tuple[int, int, int, int],
    *,
    seed: int = 0,
    layers: int = 1,
    both: bool = False,
    bias: bool = True,
    **rest: Any,
) -> Op:
    """An op for `sizes`: steps, batch, input, hidden."""
    steps, batch, width, hidden = sizes
    made = torch.Generator().manual_seed(seed)
    rows, ways = GATES[kind] * hidden, 2 if both else 1
    columns = [width if layer == 0 else hidden * ways for layer in range(layers) for _ in range(ways)]
    shapes = [(rows, size) for first in columns for size in (first, hidden)]
    return Op(
        kind,
        torch.randn(steps, batch, width, generator=made),
        [torch.randn(layers * ways, batch, hidden, generator=made) / 2 for _ in range(2 if kind == "lstm" else 1)],
        [torch.randint(-127, 128, shape, generator=made, dtype=torch.int8) for shape in shapes],
        [(torch.rand(rows, generator=made) + 0.5) / 127 / shape[1] ** 0.5 for shape in shapes],
        [torch.randn(rows, generator=made) / 2 for _ in shapes] if bias else [],
        layers,
        both,
        **rest,
    )


# -- what NumPy says -----------------------------------------------------------------------------------------------


def product(x: Array, op: Op, index: int) -> Array:
    """A dynamic linear layer: float32 for scales and levels as torch has them, int64 for sums, float64 for the rest."""
    one, axis = np.float32, -1 if op.per_token else None
    low = np.minimum(x.min(axis=axis, keepdims=True), one(0))
    high = np.maximum(x.max(axis=axis, keepdims=True), one(0))
    scale = np.maximum((high - low) / one(op.qmax), one(EPS))
    zero = np.clip(-np.rint(low / scale), 0, op.qmax)
    steps = x * (one(1) / scale)
    levels = np.clip(np.rint(steps + zero) if op.per_token else np.rint(steps) + zero, 0, op.qmax)
    acc = (levels - zero).astype(np.int64) @ op.weights[index].numpy().astype(np.int64).T
    step = scale.astype(np.float64) * op.scales[index].double().numpy()
    if op.biases:
        acc = acc + np.rint(op.biases[index].double().numpy() / step).astype(np.int64)
    result: Array = (acc * step).astype(np.float32)
    return result


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def after(kind: str, u: Array, v: Array, h: Array, c: Array) -> tuple[Array, Array]:
    """The state after one step, as the documentation of torch's modules has it, in float64."""
    if kind.startswith("rnn"):
        return (np.tanh(u + v) if kind == "rnn_tanh" else np.maximum(u + v, 0)), c
    size = h.shape[-1]
    ui, vi = ([part[..., n * size : (n + 1) * size] for n in range(GATES[kind])] for part in (u, v))
    if kind == "gru":
        reset, update = sigmoid(ui[0] + vi[0]), sigmoid(ui[1] + vi[1])
        new = np.tanh(ui[2] + reset * vi[2])
        return (1 - update) * new + update * h, c
    into, forget, out = (sigmoid(ui[n] + vi[n]) for n in (0, 1, 3))
    c = forget * c + into * np.tanh(ui[2] + vi[2])
    return out * np.tanh(c), c


sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 40), st.integers(1, 24))


@settings(max_examples=60)
@given(st.sampled_from(KINDS), sizes, st.booleans(), st.booleans(), st.sampled_from([127, 255]), st.integers(0, 2**32))
def test_every_step_is_what_numpy_says(
    kind: str, shape: tuple[int, int, int, int], bias: bool, per_token: bool, qmax: int, seed: int
) -> None:
    """Each step from the state the op itself had: a rounding that falls the other way is then not carried on."""
    op = drawn(kind, shape, seed=seed, bias=bias, per_token=per_token, qmax=qmax)
    found, *last = [part.numpy() for part in op.run()]
    h, c = op.states[0][0].numpy(), op.states[-1][0].double().numpy()
    given_by_input = product(op.x.numpy(), op, 0)
    for step in range(shape[0]):
        u, v = given_by_input[step].astype(np.float64), product(h, op, 1).astype(np.float64)
        expected, c = after(kind, u, v, h.astype(np.float64), c)
        np.testing.assert_allclose(found[step], expected, rtol=2e-6, atol=2e-6)
        h = found[step]
    np.testing.assert_array_equal(last[0][0], h)
    if kind == "lstm":
        np.testing.assert_allclose(last[1][0], c, rtol=1e-5, atol=1e-5)


# -- how layers, directions and cells come together ----------------------------------------------------------------


def alone(op: Op, place: int, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One layer of an op in one direction."""
    pair = slice(2 * place, 2 * place + 2)
    states = [state[place : place + 1] for state in op.states]
    one = Op(
        op.kind, x, states, op.weights[pair], op.scales[pair], op.biases[pair], per_token=op.per_token, qmax=op.qmax
    )
    sequence, *last = one.run()
    return sequence, [part[0] for part in last]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_directions_are_ops_of_one_layer_in_turn(kind: str, per_token: bool) -> None:
    op = drawn(kind, (5, 3, 7, 6), layers=2, both=True, per_token=per_token, seed=3)
    values, states = op.x, []
    for layer in range(2):
        forth, first = alone(op, 2 * layer, values)
        back, second = alone(op, 2 * layer + 1, values.flip(0))
        values = torch.cat([forth, back.flip(0)], -1)
        states += [first, second]
    sequence, *last = op.run()
    assert torch.equal(sequence, values)
    for part, found in enumerate(last):
        assert torch.equal(found, torch.stack([state[part] for state in states]))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_may_come_first(kind: str) -> None:
    op = drawn(kind, (5, 3, 7, 6), both=True)
    expected, found = op.run(), op.run(op.x.transpose(0, 1), batch_first=True)
    assert torch.equal(found[0].transpose(0, 1), expected[0])
    assert found[0].is_contiguous()
    assert all(torch.equal(*pair) for pair in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_a_layer_of_one_step(kind: str, bias: bool) -> None:
    op = drawn(kind, (1, 3, 7, 6), bias=bias)
    states = op.hx([state[0] for state in op.states])
    biases: list[Any] = op.biases or [None, None]
    found = OPS[f"{kind}_cell_dynamic"].target(op.x[0], states, *op.weights, *op.scales, *biases, *op.grid)
    last = [state[0] for state in op.run()[1:]]
    assert all(torch.equal(*pair) for pair in zip(found if kind == "lstm" else [found], last, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_seen(kind: str) -> None:
    whole, tokens = drawn(kind, (3, 4, 7, 6)), drawn(kind, (3, 4, 7, 6), per_token=True)
    x = whole.x.clone()
    x[1, 2, 3] = torch.nan
    assert whole.run(x)[0].isnan().all()
    assert tokens.run(x)[0].isnan().any(-1).tolist() == [[False] * 4, *[[False, False, True, False]] * 2]


def test_a_sequence_of_no_steps_is_refused_and_an_empty_batch_is_not() -> None:
    with pytest.raises(DataError, match="no steps"):
        drawn("gru", (0, 2, 3, 4)).run()
    assert drawn("lstm", (3, 0, 5, 4)).run()[0].shape == (3, 0, 4)


def test_a_number_of_steps_that_is_not_known_cannot_be_written_out() -> None:
    op = drawn("gru", (5, 3, 7, 6))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    steps: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    x = mode.from_tensor(op.x, symbolic_context=steps)
    fakes = [[mode.from_tensor(part) for part in parts] for parts in (op.states, op.weights, op.scales, op.biases)]
    arguments = (fakes[0][0], *fakes[1:], 1, False, False, *op.grid)
    with mode:
        assert OPS["gru_dynamic"].target(x, *arguments)[0].shape == (x.shape[0], 3, 6)
        with pytest.raises(RefusedError, match="number of steps"):
            OPS["gru_dynamic"].reference(x, *arguments)
