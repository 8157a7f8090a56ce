"""Float64 references of unary functions and their monotone segments; lookup tables are built from these.

They are written to keep float64's relative error even close to zero: `erfc`, `expm1` and `log1p` instead of
differences. A maker takes the options of its op by name, and gives None for those it has no reference for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Piece:
    """A monotone segment; it begins where the previous one ends."""

    rises: bool
    until: float | Tensor = math.inf
    """The last number that belongs to it. A tensor has one for each row of the curve."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A unary function and its monotone segments, from left to right.

    A curve may have rows: a different function each; it then maps tensors of shape (rows, anything).
    """

    function: Function
    pieces: tuple[Piece, ...] = (Piece(rises=True),)
    rows: int = 1


MakeCurve = Callable[..., "Curve | None"]
"""Makes the curve of an op from its options, by name."""


def always(curve: Curve) -> MakeCurve:
    """The maker for an op without options."""
    return lambda: curve


def dip(function: Function, lowest: float) -> Curve:
    """A curve that falls until `lowest` and rises after it."""
    return Curve(function, (Piece(rises=False, until=lowest), Piece(rises=True)))


def compose(curves: Sequence[Curve]) -> Function:
    """Composition of curves, in order."""

    def function(x: Tensor) -> Tensor:
        for curve in curves:
            x = curve.function(x)
        return x

    return function


def clamp(min: Any, max: Any) -> Curve | None:  # noqa: A002 - as the op has them
    if not all(bound is None or isinstance(bound, int | float) for bound in (min, max)):
        return None
    return Curve(lambda x: x.clamp(min, max))


def hardswish(x: Tensor) -> Tensor:
    return torch.where(x >= 3, x, x * (x + 3).clamp(0, 6) / 6)


def leaky_relu(negative_slope: float) -> Curve:
    return prelu(torch.tensor([float(negative_slope)], dtype=torch.float64))


def prelu(slope: Tensor) -> Curve:
    """`x` above zero, `slope * x` below, with one row per slope."""
    slopes = slope.detach().double().reshape(-1, 1)
    falls = torch.where(slopes < 0, 0.0, -math.inf)
    # below zero a row either falls or rises: the other piece is empty
    pieces = (Piece(rises=False, until=falls), Piece(rises=True, until=0.0), Piece(rises=True))
    return Curve(lambda x: torch.where(x > 0, x, x * slopes), pieces, rows=len(slopes))


def elu(alpha: float, scale: float, input_scale: float) -> Curve:
    """`scale * x` above zero, `scale * alpha * (exp(input_scale * x) - 1)` below."""
    alpha, scale, input_scale = float(alpha), float(scale), float(input_scale)

    def function(x: Tensor) -> Tensor:
        return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))

    return Curve(function, (Piece(rises=alpha * scale * input_scale >= 0, until=0.0), Piece(rises=scale >= 0)))


SELU = elu(1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


def celu(alpha: float) -> Curve | None:
    return elu(alpha, 1.0, 1.0 / alpha) if alpha else None


def softshrink(lambd: float) -> Curve:
    """Zero from `-lambd` to `lambd`, and `x` brought closer to zero by `lambd` elsewhere."""
    bound = float(lambd)
    return Curve(lambda x: x - x.clamp(-bound, bound))


def softplus(beta: float, threshold: float) -> Curve | None:
    beta, threshold = float(beta), float(threshold)
    if beta <= 0:
        return None

    def function(x: Tensor) -> Tensor:
        return torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta)

    # beyond the threshold torch omits the logarithm, and the curve drops to x
    return Curve(function, (Piece(rises=True, until=_last_within(beta, threshold)), Piece(rises=True)))


def _last_within(beta: float, threshold: float) -> float:
    """The largest float64 `x` with `x * beta <= threshold`."""
    x = threshold / beta
    while x * beta > threshold:
        x = math.nextafter(x, -math.inf)
    while (above := math.nextafter(x, math.inf)) * beta <= threshold:
        x = above
    return x


def gelu(approximate: str) -> Curve | None:
    if approximate == "none":
        return dip(lambda x: 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5)), -0.75179152469356446)
    if approximate == "tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), without the difference
        inner = 2.0 * math.sqrt(2.0 / math.pi)
        return dip(lambda x: x * torch.sigmoid(inner * (x + 0.044715 * x * x * x)), -0.75246142207101626)
    return None


RELU = Curve(lambda x: x.clamp(min=0))
HARDSWISH = dip(hardswish, -1.5)
HARDSIGMOID = Curve(lambda x: (x + 3).clamp(0, 6) / 6)
SILU = dip(lambda x: x * torch.sigmoid(x), -1.2784645427610738)
MISH = dip(lambda x: x * torch.tanh(torch.log1p(torch.exp(x))), -1.1924312145154952)
SIGMOID = Curve(torch.sigmoid)
TANH = Curve(torch.tanh)
