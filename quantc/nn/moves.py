"""ATen's ops that move numbers about and change none: on quantized tensors they move levels, and the grid stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.errors import DataError, MixedTensorsError
from quantc.nn.module_path import running_module
from quantc.nn.quantized_tensor import QuantizedTensor, check_quantized, float_op_error, handles

aten = torch.ops.aten

MOVES = (
    aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.as_strided.default,
    aten.slice.Tensor, aten.select.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.index_select.default, aten.index.Tensor, aten.flip.default, aten.roll.default,
    aten.repeat.default, aten.unfold.default, aten.channel_shuffle.default, aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default, aten.gather.default, aten.narrow.default, aten.max.default, aten.min.default,
    aten.amax.default, aten.amin.default,
)  # fmt: skip
"""Ops with one result that ignore channels: levels have the order of the numbers they stand for."""
PIECES = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
"""Ops with several results."""
COPIES = (aten.clone.default, aten.detach.default, aten.alias.default, aten.contiguous.default, aten.lift_fresh.default)
"""Ops that keep every axis in its place."""


@handles(*MOVES)
def _move(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    _refuse_channels(func, q)
    return q.like(func(q.data_of, *args, **kwargs))


@handles(aten.view.default)
def _view(func: Any, q: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """`view`, as `reshape`: kernels leave results channels-last, where some views need a copy."""
    _refuse_channels(func, q)
    return q.like(q.data_of.reshape(size))


@handles(*PIECES)
def _pieces(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> list[QuantizedTensor]:
    _refuse_channels(func, q)
    return [q.like(piece) for piece in func(q.data_of, *args, **kwargs)]


@handles(*COPIES)
def _copy(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return q.like(func(q.data_of, *args, **kwargs))


@handles(aten.argmax.default, aten.argmin.default, aten.argsort.default)
def _places(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Positions from `argmax` and its like: levels are in the same order as the numbers."""
    _refuse_channels(func, q)
    found: Tensor = func(q.data_of, *args, **kwargs)
    return found


@handles(aten.max.dim, aten.min.dim, aten.sort.default, aten.sort.stable, aten.topk.default)
def _sort(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> tuple[QuantizedTensor, Tensor]:
    _refuse_channels(func, q)
    levels, places = func(q.data_of, *args, **kwargs)
    return q.like(levels), places


@handles(aten.permute.default)
def _permute(func: Any, q: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    order = [dim % q.dim() for dim in dims]
    at = None if q.axis_of is None else order.index(q.axis_of)
    return QuantizedTensor(func(q.data_of, order), q.scale_of, q.zero_point_of, at)


@handles(aten.transpose.int, aten.t.default)
def _transpose(func: Any, q: QuantizedTensor, *pair: int) -> QuantizedTensor:
    first, second = (dim % q.dim() for dim in pair) if pair else (0, 1)
    order = list(range(q.dim()))
    order[first], order[second] = order[second], order[first]
    return _permute(aten.permute.default, q, order)  # type: ignore[no-any-return]


@handles(aten.cat.default, aten.stack.default)
def _join(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> QuantizedTensor:
    """Join tensors on one grid. Others must be requantized first, which rounds, so callers request it by name."""
    first, *others = (check_quantized(x, str(func)) for x in tensors)
    _refuse_channels(func, first)
    if any(
        (q.scale_of, q.zero_point_of, q.dtype) != (first.scale_of, first.zero_point_of, first.dtype) for q in others
    ):
        raise DataError(
            f"{func} joins quantized tensors on one grid, and these have several",
            where=running_module() or None,
            advice="use FloatFunctional().cat in the model, which brings them onto the grid of the result",
        )
    return first.like(func([q.data_of for q in (first, *others)], dim))


@handles(aten.copy_.default)
def _copy_into(func: Any, q: Tensor, source: Tensor, *_: Any) -> Tensor:
    """Levels written over others: both must be quantized, on one grid."""
    into, given = check_quantized(q, str(func)), check_quantized(source, str(func))
    if (into.scale_of, into.zero_point_of) != (given.scale_of, given.zero_point_of):
        raise DataError(f"{func} copies between quantized tensors on one grid", advice="copy int_repr() yourself")
    into.data_of.copy_(given.data_of)
    return into


@handles(aten.constant_pad_nd.default)
def _pad(func: Any, q: QuantizedTensor, pad: Sequence[int], value: float = 0) -> QuantizedTensor:
    _refuse_channels(func, q)
    scale, zero_point = q.grid
    limits = torch.iinfo(q.dtype)
    level = min(max(round(value / scale) + zero_point, limits.min), limits.max)
    return q.like(func(q.data_of, pad, level))


@handles(aten._to_copy.default)
def _send(func: Any, q: QuantizedTensor, *, dtype: Any = None, **kwargs: Any) -> QuantizedTensor:
    if dtype not in (None, q.dtype):
        raise MixedTensorsError(
            f"a quantized tensor was to become {dtype}",
            where=running_module() or None,
            advice="take q.dequantize() for its numbers, q.int_repr() for its levels",
        )
    return q.like(func(q.data_of, **kwargs))


@handles(aten.equal.default)
def _equal(func: Any, q: Any, other: Any) -> bool:
    return isinstance(q, QuantizedTensor) and q.equals(other)


@handles(aten.dequantize.self)
def _dequantize(func: Any, q: QuantizedTensor) -> Tensor:
    return q.dequantize()


@handles(aten.int_repr.default)
def _integers(func: Any, q: QuantizedTensor) -> Tensor:
    return q.int_repr()


def _refuse_channels(func: Any, q: QuantizedTensor) -> None:
    if q.axis_of is not None:
        raise DataError(
            f"{func} would take scales by channel apart from their channels",
            advice="dequantize first; clone, permute and transpose keep them together",
        )


@handles(aten.as_strided_.default)
def _restride(func: Any, q: QuantizedTensor, size: Sequence[int], stride: Sequence[int], *_: Any) -> QuantizedTensor:
    """Pooling to a single place says so of its result, to have it channels last: steps along axes of one place mean
    nothing, so nothing is moved."""
    steps = [(step, own) for length, step, own in zip(size, stride, q.stride(), strict=False) if length > 1]
    if list(size) != list(q.shape) or any(step != own for step, own in steps):
        raise float_op_error(func)
    return q
