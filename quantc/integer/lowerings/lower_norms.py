"""Integer lowering of norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantc.integer.epilogue import Term, finish_sum, reach
from quantc.integer.fixed_point import common_shift
from quantc.integer.grid import Grid
from quantc.integer.match_lowering import NotIntegerError, Task, tail_bounds
from quantc.integer.ops.elementwise import SUMMED
from quantc.integer.ops.integer_norms import (
    NORM_DEVIATION,
    NORMALIZE,
    NORMALIZED,
    eps_of,
    fixed_places,
    reciprocal_places,
)
from quantc.integer.semantics import computes
from quantc.ir.types import TensorType, tensor_type


@dataclass(frozen=True, eq=False)
class NormRows:
    """A norm: row length, eps, affine parameters, and whether the mean is subtracted."""

    length: int
    eps: float
    gamma: Tensor | None
    beta: Tensor | None = None
    centre: bool = True


@computes("layer_norm", formula=NORMALIZED, deviation=NORM_DEVIATION)
def _layer_norm(task: Task) -> None:
    gamma, beta = (_constant(task, name) for name in "wb")
    _normalize(task, NormRows(_length(task.argument("normalized_shape")), task.argument("eps"), gamma, beta))


@computes("rms_norm", formula=NORMALIZED, deviation=NORM_DEVIATION)
def _rms_norm(task: Task) -> None:
    length, eps = _length(task.argument("normalized_shape")), task.argument("eps")
    # without one, torch takes that of the dtype
    used = torch.finfo(torch.float32).eps if eps is None else eps
    _normalize(task, NormRows(length, used, _constant(task, "w"), centre=False))


@computes("group_norm", formula=NORMALIZED, deviation=NORM_DEVIATION)
def _group_norm(task: Task) -> None:
    shape = _type(task).shape
    _normalize(task, _channel_rows(task, _length(shape[1:]) // task.argument("num_groups")))


@computes(
    "instance_norm",
    formula=f"{NORMALIZED}; with the statistics of the training as batch_norm",
    deviation=NORM_DEVIATION,
)
def _instance_norm(task: Task) -> None:
    if not task.argument("use_input_stats"):
        return _by_known_statistics(task)
    return _normalize(task, _channel_rows(task, _length(_type(task).shape[2:])))


@computes(
    "batch_norm",
    formula=f"{SUMMED}; M = (sx · g) / so, offset = (beta − mean · g) / so, g = gamma / √(var + eps), for each channel",
)
def _batch_norm(task: Task) -> None:
    if task.argument("training"):
        raise NotIntegerError("it is in training mode")
    _by_known_statistics(task)


def _by_known_statistics(task: Task) -> None:
    """With mean and variance known, a norm multiplies each channel by a number and adds another."""
    x = task.whole(task.argument("x"))
    gamma, beta, mean, var = (_constant(task, name) for name in ("w", "b", "mean", "var"))
    if mean is None or var is None:
        raise NotIntegerError("it has no statistics of the training")
    factor = (torch.ones_like(var) if gamma is None else gamma) / torch.sqrt(var + task.argument("eps"))
    offset = -mean * factor if beta is None else beta - mean * factor
    scale = _on_channels(task, x.grid.scale * factor)
    finish_sum(task, [Term(x.node, x.grid.one_zero_point, scale, reach(x.grid))], _on_channels(task, offset))


def _channel_rows(task: Task, length: int) -> NormRows:
    """Rows whose gamma and beta belong to channels."""
    gamma, beta = (_constant(task, name) for name in "wb")
    return NormRows(
        length,
        task.argument("eps"),
        None if gamma is None else _on_channels(task, gamma),
        None if beta is None else _on_channels(task, beta),
    )


def _on_channels(task: Task, values: Tensor) -> Tensor:
    """One number for each channel, shaped to go with axis 1."""
    return values.reshape(-1, *[1] * (_type(task).rank - 2))


def _type(task: Task) -> TensorType:
    kind = tensor_type(task.core)
    if kind is None:
        raise NotIntegerError("its shape is not known")
    return kind


def _length(sizes: Any) -> int:
    if not all(isinstance(size, int) for size in sizes):
        raise NotIntegerError("how many elements it normalizes together is not known before it runs")
    return math.prod(sizes)


def _constant(task: Task, name: str) -> Tensor | None:
    node = task.argument(name)
    if node is None:
        return None
    found = task.constant(node)
    if found is None:
        raise NotIntegerError(f"its operand {node.name} is not a constant")
    return found.detach().double()


def _normalize(task: Task, rows: NormRows) -> None:
    x, bounds, quantizers = task.whole(task.argument("x")), tail_bounds(task.tail), task.quantizers()
    if bounds is None or not quantizers:
        raise NotIntegerError("its result is read in float")
    if rows.length < 1:
        raise NotIntegerError("it normalizes nothing")
    eps = eps_of(rows.length, reach(x.grid), rows.eps, x.grid.one_scale)
    if eps is None:
        raise NotIntegerError(f"it normalizes {rows.length} elements together, whose squares int64 cannot hold")
    head = (x.node, x.grid.one_zero_point, rows.length, rows.centre, eps.value, eps.places)
    numbers = {quantizer: _numbers(task, rows, task.grid(quantizer)) for quantizer in quantizers}
    for quantizer, values in numbers.items():
        grid = task.grid(quantizer)
        names = ("multiplier", "offset", "shift")
        kept = [None if value is None else task.keep(name, value) for name, value in zip(names, values, strict=True)]
        rest = (*kept, grid.one_zero_point, *bounds.on(grid), grid.dtype)
        task.replace(quantizer, task.emit(NORMALIZE.target, *head, *rest, dtype=grid.dtype))


def _numbers(task: Task, rows: NormRows, out: Grid) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Multiplier, offset and shift, in the form that was asked for."""
    gamma = torch.ones((), dtype=torch.float64) if rows.gamma is None else rows.gamma
    factor, offset = gamma / out.scale, None if rows.beta is None else rows.beta / out.scale
    task.check_shifts(factor)
    if task.arithmetic.multiplier == "float64":
        return factor * 2.0 ** -reciprocal_places(rows.length), offset, None
    found = common_shift([factor * 2.0 ** -fixed_places(rows.length)], [2**31], offset)
    if found is None:
        raise NotIntegerError("its multipliers are too large for sums of 64 bits")
    (mantissa,), constant, shift = found
    return mantissa, constant, shift
