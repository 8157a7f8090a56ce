"""Float64 references of unary activations and their monotone segments; lookup tables are built from these.

They are written to keep float64's relative error even close to zero: `erfc`, `expm1` and `log1p` instead of
differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from quantc.integer.grid import Grid
from quantc.ir.dialect import argument, op_name

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

    def levels(self, x: Tensor, grid: Grid) -> Tensor:
        """`clamp(round_half_even(f(x) / scale) + zero_point)` of float64 inputs: the quantized results."""
        steps = torch.round(self.function(x) / grid.scale) + grid.zero_point
        return steps.clamp(grid.qmin, grid.qmax).to(torch.int64)


def curve_of(node: fx.Node) -> Curve | None:
    """Reference curve of an op; None if the op is not a known unary function."""
    make = CURVES.get(op_name(node))
    return None if make is None else make(node)


def _clamp(node: fx.Node) -> Curve | None:
    low, high = argument(node, "min"), argument(node, "max")
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        return None
    return Curve(lambda x: x.clamp(low, high))


def _leaky_relu(node: fx.Node) -> Curve:
    return prelu(torch.tensor([float(argument(node, "negative_slope"))], dtype=torch.float64))


def prelu(slope: Tensor) -> Curve:
    """`x` above zero, `slope * x` below, with one row per slope."""
    slopes = slope.detach().double().reshape(-1, 1)
    falls = torch.where(slopes < 0, 0.0, -math.inf)
    # below zero a row either falls or rises: the other piece is empty
    pieces = (Piece(rises=False, until=falls), Piece(rises=True, until=0.0), Piece(rises=True))
    return Curve(lambda x: torch.where(x > 0, x, x * slopes), pieces, rows=len(slopes))


def _elu(node: fx.Node) -> Curve:
    return _exponential(*(float(argument(node, name)) for name in ("alpha", "scale", "input_scale")))


def _selu(_node: fx.Node) -> Curve:
    return _exponential(1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)


def _celu(node: fx.Node) -> Curve | None:
    alpha = float(argument(node, "alpha"))
    return _exponential(alpha, 1.0, 1.0 / alpha) if alpha else None


def _exponential(alpha: float, scale: float, input_scale: float) -> Curve:
    """`scale * x` above zero, `scale * alpha * (exp(input_scale * x) - 1)` below."""

    def function(x: Tensor) -> Tensor:
        return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))

    return Curve(function, (Piece(rises=alpha * scale * input_scale >= 0, until=0.0), Piece(rises=scale >= 0)))


def _softplus(node: fx.Node) -> Curve | None:
    beta, threshold = float(argument(node, "beta")), float(argument(node, "threshold"))
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


def _gelu(node: fx.Node) -> Curve | None:
    approximate = argument(node, "approximate")
    if approximate == "none":
        return _dips(lambda x: 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5)), -0.75179152469356446)
    if approximate == "tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), without the difference
        inner = 2.0 * math.sqrt(2.0 / math.pi)
        return _dips(lambda x: x * torch.sigmoid(inner * (x + 0.044715 * x * x * x)), -0.75246142207101626)
    return None


def _dips(function: Function, lowest: float) -> Curve:
    """A curve that falls until `lowest` and rises after it."""
    return Curve(function, (Piece(rises=False, until=lowest), Piece(rises=True)))


def _plain(curve: Curve) -> Callable[[fx.Node], Curve]:
    """A curve whose op takes no options."""
    return lambda _node: curve


def _hardswish(x: Tensor) -> Tensor:
    return torch.where(x >= 3, x, x * (x + 3).clamp(0, 6) / 6)


CURVES: dict[str, Callable[[fx.Node], Curve | None]] = {
    "relu": _plain(Curve(lambda x: x.clamp(min=0))),
    "clamp": _clamp,
    "hardswish": _plain(_dips(_hardswish, -1.5)),
    "hardsigmoid": _plain(Curve(lambda x: (x + 3).clamp(0, 6) / 6)),
    "silu": _plain(_dips(lambda x: x * torch.sigmoid(x), -1.2784645427610738)),
    "mish": _plain(_dips(lambda x: x * torch.tanh(torch.log1p(torch.exp(x))), -1.1924312145154952)),
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "selu": _selu,
    "celu": _celu,
    "sigmoid": _plain(Curve(torch.sigmoid)),
    "tanh": _plain(Curve(torch.tanh)),
    "softplus": _softplus,
}
"""By the name of the op; what makes the curve reads the op's options."""


def composed(curves: list[Curve]) -> Function:
    """Composition of curves, in order."""

    def function(x: Tensor) -> Tensor:
        for curve in curves:
            x = curve.function(x)
        return x

    return function


__all__ = ["CURVES", "Curve", "Piece", "composed", "curve_of", "prelu"]
