"""Functions of real numbers for the oracle, from their definitions, in NumPy's float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import fx

from quantc.ir.dialect import argument
from tests.support.integer_oracle_sums import Reals

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946

_erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Reals) -> Reals:
    tail = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + tail), tail / (1 + tail))


def softplus(x: Reals, beta: float = 1.0, threshold: float = math.inf) -> Reals:
    scaled = x * beta
    return np.where(scaled > threshold, x, (np.maximum(scaled, 0) + np.log1p(np.exp(-np.abs(scaled)))) / beta)


def elu(x: Reals, alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> Reals:
    below = alpha * np.expm1(np.minimum(x * input_scale, 0))
    return scale * np.where(x > 0, x, below)


def gelu(x: Reals, approximate: str) -> Reals:
    if approximate == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def hardsigmoid(x: Reals) -> Reals:
    return np.clip(x + 3, 0, 6) / 6


def _number(node: fx.Node, name: str) -> float:
    return float(argument(node, name))


FUNCTIONS: dict[str, Callable[[Reals, fx.Node], Any]] = {
    "sigmoid": lambda x, node: sigmoid(x),
    "tanh": lambda x, node: np.tanh(x),
    "hardsigmoid": lambda x, node: hardsigmoid(x),
    "hardswish": lambda x, node: x * hardsigmoid(x),
    "silu": lambda x, node: x * sigmoid(x),
    "mish": lambda x, node: x * np.tanh(softplus(x)),
    "gelu": lambda x, node: gelu(x, argument(node, "approximate")),
    "leaky_relu": lambda x, node: np.where(x > 0, x, x * _number(node, "negative_slope")),
    "elu": lambda x, node: elu(x, _number(node, "alpha"), _number(node, "scale"), _number(node, "input_scale")),
    "selu": lambda x, node: elu(x, SELU_ALPHA, SELU_SCALE),
    "celu": lambda x, node: elu(x, _number(node, "alpha"), 1.0, 1 / _number(node, "alpha")),
    "softshrink": lambda x, node: np.sign(x) * np.maximum(np.abs(x) - _number(node, "lambd"), 0),
    "softplus": lambda x, node: softplus(x, _number(node, "beta"), _number(node, "threshold")),
}
"""By the name of the op: the real numbers it reads to those it yields; the node has its other arguments."""


def softmax(x: Reals, axis: int) -> Reals:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True))


def normalized(x: Reals, axes: tuple[int, ...], eps: float) -> Reals:
    """Less its mean, by its standard deviation."""
    rest = x - x.mean(axis=axes, keepdims=True)
    return np.asarray(rest / np.sqrt((rest**2).mean(axis=axes, keepdims=True) + eps))


def root_mean_square(x: Reals, axes: tuple[int, ...], eps: float) -> Reals:
    return np.asarray(x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + eps))
