"""Weights of some distributions, their fitted scales, and what torch's ops make of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantc.observe import Fit, start
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import PerChannel, PerGroup, PerTensor
from quantc.spec.granularity import Share, as_rows
from quantc.spec.numerics import QParams
from quantc.spec.spec import (
    QuantSpec,
)

SHAPE = (3, 4, 8)
SHARED: list[Share] = [PerTensor(), PerChannel(axis=1), PerChannel(axis=-1), PerGroup(axis=2, size=4)]


def fitted(weight: Tensor, spec: QuantSpec) -> QParams:
    observation = start(spec)
    assert isinstance(observation, Fit)
    observation.update(weight)
    return observation.qparams(spec)


def as_torch_has_it(weight: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """A weight quantized and brought back by torch's ops, a row for each group that shares a scale."""
    ops, ends = decomposed_ops(), (spec.qmin, spec.qmax, spec.dtype.storage)
    rows, scale, zero_point = (
        as_rows(weight, spec.granularity),
        qparams.scale.reshape(-1),
        qparams.zero_point.reshape(-1),
    )
    if isinstance(spec.granularity, PerGroup):
        given = (scale.unsqueeze(1), zero_point.unsqueeze(1), *ends, rows.shape[1])
        levels = ops.quantize_per_channel_group(rows, *given)
        return a_tensor(ops.dequantize_per_channel_group(levels, *given, torch.float32))
    levels = ops.quantize_per_channel(rows, scale, zero_point, 0, *ends)
    return a_tensor(ops.dequantize_per_channel(levels, scale, zero_point, 0, *ends))


def a_tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def errors(weight: Tensor, qparams: QParams, spec: QuantSpec) -> NDArray[np.float64]:
    """The squared error of each group."""
    rows = as_rows(weight, spec.granularity).double()
    found: NDArray[np.float64] = (rows - as_torch_has_it(weight, qparams, spec)).square().sum(1).numpy()
    return found


def decibels(signal: Tensor, noise: Tensor) -> float:
    return 10 * math.log10(float(signal.double().square().sum() / noise.double().square().sum()))


def sqnr_of(weight: Tensor, spec: QuantSpec) -> float:
    rows = as_rows(weight, spec.granularity)
    return decibels(rows, rows.double() - as_torch_has_it(weight, fitted(weight, spec), spec))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laplace(*shape: int) -> Tensor:
    radius = torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(1)).sqrt()
    return gaussian(*shape) * radius


def student(*shape: int) -> Tensor:
    return gaussian(*shape) / gaussian(3, *shape, seed=1).square().mean(0).sqrt()


KINDS: dict[str, Callable[..., Tensor]] = {"gaussian": gaussian, "laplace": laplace, "student": student}
