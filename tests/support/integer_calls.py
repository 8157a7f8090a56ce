"""One or more calls of every op of `torch.ops.quantc`, made by hand: what its kernel, its reference, torch's own checks
and the pass that writes it out are tried on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantc.integer.library import OPS
from quantc.integer.semantics import load

load()


@dataclass(frozen=True, eq=False)
class Call:
    """An op and its arguments."""

    op: str
    case: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.op}-{self.case}"

    @property
    def target(self) -> Any:
        return OPS[self.op].target


def _integers(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    limits = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max + 1, shape, generator=generator).to(dtype)


def _small(*shape: int, high: int = 500, seed: int = 1) -> Tensor:
    return torch.randint(-high, high, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, W = _integers(3, 5, 8), _integers(6, 8, dtype=torch.int8)
IMAGE, KERNEL = _integers(2, 4, 9, 7), _integers(6, 2, 3, 3, dtype=torch.int8)
TURNED = _integers(4, 3, 3, 2, dtype=torch.int8)
BIAS = _small(6).to(torch.int32)
F64 = torch.float64


def _float64(value: Any = 0.0125) -> tuple[Any, ...]:
    """The last arguments of an op that ends on a grid of uint8, its multiplier float64."""
    return (torch.as_tensor(value, dtype=F64), None, 100, 0, 255, torch.uint8)


FIXED = (torch.tensor(1717986918, dtype=torch.int32), torch.tensor(37, dtype=torch.int32), -3, -128, 127, torch.int8)
TO_FLOAT = (torch.tensor(0.003, dtype=F64), None, 0, 0, 0, torch.float32)
ACCUMULATOR = (None, None, 0, 0, 0, torch.int32)
CHANNELS = torch.linspace(0.001, 0.02, 6, dtype=F64)
TABLE = _integers(256, seed=3)
POWERS = torch.round(torch.exp(-0.03 * torch.arange(256, dtype=F64)) * 2.0**40).to(torch.int64)
WINDOWS: tuple[Any, ...] = ([2, 1], [1, 0], [1, 1], 2, 0)
DILATED: tuple[Any, ...] = ([1, 1], [2, 1], [2, 1], 2, 0)
SPANS = ([torch.tensor([0, 3, 6]), torch.tensor([0, 3])], [torch.tensor([4, 7, 9]), torch.tensor([4, 7])])

PICKED = torch.tensor([[0, 5], [2, 2]])
GROUPED = (_floats(6, 2).abs(), torch.arange(12).reshape(6, 2), None, 4)
"""Scales and zero points of groups of 4, no axis, and the size."""


def _recurrent() -> list[Call]:
    """Every kind of recurrent layer, in both directions with biases, and as a cell without; whole and by tokens."""
    grid = (None, 0, 127, torch.uint8, 2.0**-14)
    calls: list[Call] = []
    for kind, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        weights = [_integers(2 * gates, 3 if step % 2 == 0 else 2, dtype=torch.int8, seed=step) for step in range(4)]
        scales = [torch.rand(2 * gates, generator=torch.Generator().manual_seed(step)) / 200 for step in range(4)]
        biases = [_floats(2 * gates, seed=step) for step in range(4)]
        states = [_floats(2, 5, 2, seed=step) for step in range(2 if kind == "lstm" else 1)]
        parts: Any = [state[0] for state in states]
        hx, h = (states, parts) if kind == "lstm" else (states[0], parts[0])
        layers = (_floats(5, 4, 3), hx, weights, scales, biases, 1, True, True, False, *grid)
        cell = (_floats(5, 3), h, *weights[:2], *scales[:2], None, None, True, *grid)
        calls += [Call(f"{kind}_dynamic", "both", layers), Call(f"{kind}_cell_dynamic", "tokens", cell)]
    return calls


GRID: tuple[Any, ...] = (None, 0, 255, torch.uint8, 1e-6)
AROUND: tuple[Any, ...] = (0, -127, 127, torch.int8, 1e-6)

CALLS = (
    Call("linear", "float64", (X, 12, W, None, BIAS, 0, *_float64(CHANNELS))),
    Call("linear", "fixed", (X, 12, W, torch.tensor([1, 0, 3, -2, 0, 5]), None, 0, *FIXED)),
    Call("linear", "float", (X, 0, W, torch.tensor(4), BIAS, 0, *TO_FLOAT)),
    Call("linear", "accumulator", (X, 255, W, None, BIAS, 0, *ACCUMULATOR)),
    Call("matmul", "batches", (X, 3, _integers(3, 8, 4), torch.tensor(7), None, 0, *_float64(0.001))),
    Call("matmul", "broadcast", (X, 128, _integers(2, 1, 8, 4), torch.tensor(128), None, 0, *FIXED)),
    Call("matmul", "vector", (X, 3, _integers(8), None, None, 0, *TO_FLOAT)),
    Call("conv", "float64", (IMAGE, 7, KERNEL, None, BIAS, *WINDOWS, *_float64(CHANNELS.reshape(-1, 1, 1)))),
    Call("conv", "dilated", (IMAGE, 7, KERNEL, torch.arange(6), BIAS, *DILATED, *FIXED)),
    Call("conv_transpose", "strided", (IMAGE, 9, TURNED, None, BIAS, [2, 3], [1, 0], [1, 2], 2, [1, 2], 0, *FIXED)),
    Call("requantize", "float64", (X, 17, *_float64(0.75))),
    Call("requantize", "fixed", (X, 17, *FIXED)),
    Call("sum", "float64", ([X, X], [3, 5], [torch.tensor(0.5, dtype=F64)] * 2, torch.tensor(0.3, dtype=F64), *_float64()[1:])),
    Call("mul", "float64", (X, 3, X, 5, *_float64(0.01))),
    Call("linear_grouped", "float64", (X, 4, W, None, 4, None, *_float64(CHANNELS.reshape(-1, 1).repeat(1, 2)))),
    Call("lookup", "whole", (X, TABLE, -1)),
    Call("lookup", "rows", (X, TABLE.reshape(1, -1).repeat(5, 1), -2)),
    Call("steps", "whole", (_small(3, 5).to(torch.int32), torch.tensor([-90, 3, 80], dtype=torch.int32), TABLE[:4], -1)),
    Call("sum_over", "mean", (IMAGE, 4, [2, 3], False, *_float64(0.01))),
    Call("sum_windows", "padded", (IMAGE, 4, [3, 2], [2, 2], [1, 1, 0, 1], *_float64(0.1))),
    Call("sum_spans", "adaptive", (IMAGE, 4, *SPANS, *_float64(0.05))),
    Call("softmax", "float64", (X, POWERS, -1, *_float64(255.0))),
    Call("normalize", "centred", (X, 9, 8, True, 12345, 20, *_float64(2.0**-25)[:1], None, *_float64()[1:])),
    Call("embedding", "rows", (W, None, torch.rand(6, generator=torch.Generator().manual_seed(4)), torch.tensor([[0, 5], [2, 2]]))),
    Call("linear_dynamic", "tokens", (_floats(3, 5, 8), W, None, CHANNELS, _floats(6), True, None, 0, 255, torch.uint8, 1e-6)),
    Call("linear_dynamic", "whole", (_floats(3, 5, 8), W, None, CHANNELS[0], None, False, 0, -127, 127, torch.int8, 1e-6)),
    Call("stored_weight", "channels", (W, CHANNELS.float(), torch.arange(6), 0, None, None, None)),
    Call("stored_weight", "turned groups", (W, *GROUPED, [6, 2, 4], [0, 2, 1])),
    Call("linear_weight_only", "channels", (_floats(3, 5, 8), W, CHANNELS.float(), None, 0, None, None, None, _floats(6), False)),
    Call("linear_weight_only", "groups", (_floats(3, 5, 8), W, *GROUPED, None, None, None, False)),
    Call("linear_weight_only", "transposed", (_floats(5, 6), W.half(), None, None, None, None, None, None, _floats(8), True)),
    Call("linear_weight_only", "turned", (_floats(3, 5, 8), W, *GROUPED, None, [1, 0], None, True)),
    Call("embedding_weight_only", "rows", (W, CHANNELS.float(), torch.arange(6), 0, None, PICKED)),
    Call("embedding_weight_only", "groups", (W, *GROUPED, PICKED)),
    Call("embedding_weight_only", "fp16", (_floats(6, 8).half(), None, None, None, None, PICKED)),
    Call("embedding_bag_weight_only", "mean", (W, *GROUPED, PICKED.reshape(-1), torch.tensor([0, 1]), 1, None, False, 2)),
    Call("embedding_bag_weight_only", "sum", (W, CHANNELS.float(), None, 0, None, PICKED.reshape(-1), torch.tensor([0, 1, 4]), 0, _floats(4), True, None)),
    *_recurrent(),
    Call("matmul_dynamic", "tokens", (_floats(3, 5, 8), W.t().contiguous(), torch.arange(6), CHANNELS, _floats(6), True, *GRID, 0.5)),
    Call("conv_dynamic", "dilated", (_floats(2, 4, 9, 7), KERNEL, None, CHANNELS, _floats(6), [1, 1], [2, 1], [2, 1], 2, *GRID)),
    Call("conv_dynamic", "one item", (_floats(4, 9, 7), KERNEL, torch.arange(6), CHANNELS[0], None, [2, 1], [1, 0], [1, 1], 2, *AROUND)),
    Call("conv_transpose_dynamic", "strided", (_floats(2, 4, 9, 7), TURNED, None, CHANNELS, _floats(6), [2, 3], [1, 0], [1, 2], 2, [1, 2], *GRID)),
    Call("linear_both_dynamic", "tokens", (_floats(3, 5, 8), _floats(6, 8, seed=5), _floats(6), True, *GRID, True, *AROUND)),
    Call("matmul_both_dynamic", "broadcast", (_floats(3, 5, 8), _floats(2, 1, 8, 4, seed=6), None, True, *AROUND, False, *GRID, 2.0)),
    Call("matmul_both_dynamic", "vector", (_floats(3, 5, 8), _floats(8, seed=7), None, True, *GRID, False, *GRID)),
)  # fmt: skip
IDS = [str(call) for call in CALLS]
