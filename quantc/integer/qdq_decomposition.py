"""Decomposition of quantize, dequantize and choose-qparams ops into ATen primitives.

Each function below is one op of the Q/DQ form, bit for bit. They follow torch's order of operations: there per-tensor
scales are Python numbers, so tensor scales are converted to what such numbers would become.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from quantc.integer.trace_ops import OpWriter
from quantc.ir.program import Program
from quantc.qdq.choose_qparams import choose_qparams, extremes
from quantc.qdq.ops import is_choice, is_dequantize, is_quantize
from quantc.rewrite.replacements import Substitution
from quantc.spec.aten_arithmetic import aten

NARROW_FLOATS = (torch.float16, torch.bfloat16)


def open_boundaries(program: Program) -> int:
    """Replace every quantize and dequantize op by ATen ops with the same bits; the last of them keeps the name.

    Identical ops on one tensor are written once. Returns the number of replaced ops.
    """
    writer = OpWriter(program)
    return sum(_open(program, graph, writer) for _, graph in list(program.graphs()))


def _open(program: Program, graph: fx.Graph, writer: OpWriter) -> int:
    walk = Substitution(program)
    seen: dict[tuple[Any, ...], Any] = {}
    several: dict[fx.Node, tuple[fx.Node, ...]] = {}
    """Replacements of the items of an op with several results."""
    count = 0
    for node in graph.nodes:
        walk.arrive(node)
        if node.target is operator.getitem and node.args[0] in several:
            walk.forward(node, several[node.args[0]][node.args[1]])
            continue
        if not (is_quantize(node) or is_dequantize(node) or is_choice(node)) or not node.users:
            continue
        count += 1
        key = (node.target, node.args, tuple(node.kwargs.items()))
        is_known = key in seen
        if not is_known:
            seen[key] = _decompose(writer, node)
        if isinstance(seen[key], tuple):
            several[node] = seen[key]
        elif is_known:
            walk.forward(node, seen[key])
        else:
            walk.replace(node, seen[key])
    walk.finish()
    for node in several:
        program.erase(node)
    return count


def _decompose(writer: OpWriter, node: fx.Node) -> Any:
    """Node or nodes of a decomposed Q/DQ op."""
    spelled = SPELLED[str(node.target).removeprefix("quantized_decomposed.")]
    made = writer.write(spelled, node.args, node, **node.kwargs)
    if isinstance(made, fx.Node) and "val" in node.meta:
        made.meta["val"] = node.meta["val"]
    return made


# -- one scale for the whole tensor ----------------------------------------------------------------------------


def _quantize_whole(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    return _levels(_wide(x), 1.0 / scale, zero_point, (qmin, qmax), dtype)


def _quantize_by_tensors(
    x: Tensor, scale: Tensor, zero_point: Tensor, qmin: Any, qmax: Any, dtype: torch.dtype
) -> Tensor:
    inverse = aten.reciprocal.default(_number(scale, torch.float64))
    bounds = [item if isinstance(item, int) else _number(item, torch.float32) for item in (qmin, qmax)]
    offset = aten.reshape.default(zero_point, [])
    return _levels(_wide(x), aten.to.dtype(inverse, torch.float32), offset, bounds, dtype)


def _levels(x: Tensor, inverse: Any, zero_point: Any, bounds: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """`clamp(round_half_even(x * inverse) + zero_point, *bounds)` in the numbers of `x`."""
    levels = aten.add.Tensor(aten.round.default(aten.mul.Tensor(x, inverse)), zero_point)
    clamp = aten.clamp.default if isinstance(bounds[0], int) else aten.clamp.Tensor
    return aten.to.dtype(clamp(levels, *bounds), dtype)


def _dequantize_whole(
    q: Tensor,
    scale: float,
    zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    real = aten.to.dtype(q, out_dtype or torch.float32)
    return aten.mul.Tensor(real if zero_point == 0 else aten.sub.Tensor(real, zero_point), scale)


def _dequantize_by_tensors(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: Any,
    qmax: Any,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    kind = out_dtype or torch.float32
    # half floats calculate with Python numbers in float32 and round each result
    inside = torch.float32 if kind in NARROW_FLOATS else kind
    real = aten.to.dtype(aten.to.dtype(q, kind), inside)
    centered = aten.to.dtype(aten.sub.Tensor(real, _number(zero_point, inside)), kind)
    return aten.to.dtype(aten.mul.Tensor(aten.to.dtype(centered, inside), _number(scale, inside)), kind)


def _wide(x: Tensor) -> Tensor:
    """Half floats as float32; anything else as it is."""
    return aten.to.dtype(x, torch.float32)


def _number(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The one element of a tensor."""
    return aten.to.dtype(aten.reshape.default(value, []), dtype)


# -- a scale for each channel, token or group ------------------------------------------------------------------


def _quantize_channels(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    inverse = aten.reciprocal.default(_along(scales, x, axis))
    return _levels(_wide(x), inverse, _along(zero_points, x, axis), (qmin, qmax), dtype)


def _dequantize_channels(
    q: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    axis: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    offsets = None if zero_points is None else _along(zero_points, q, axis)
    return aten.to.dtype(_reals(q, _along(scales, q, axis), offsets), out_dtype or torch.float32)


def _quantize_tokens(
    x: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    """Here torch adds the zero point before it rounds."""
    levels = aten.add.Tensor(aten.mul.Tensor(x, aten.reciprocal.default(scales)), zero_points)
    return aten.to.dtype(aten.clamp.default(aten.round.default(levels), qmin, qmax), dtype)


def _dequantize_tokens(
    q: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype, output_dtype: torch.dtype
) -> Tensor:
    return aten.to.dtype(_reals(q, scales, zero_points), output_dtype)


def _quantize_groups(
    x: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype, group_size: int
) -> Tensor:
    groups = _groups(x, scales, group_size)
    levels = _quantize_tokens(groups, _column(scales), _column(zero_points), qmin, qmax, dtype)
    return aten.reshape.default(levels, [*x.shape])


def _dequantize_groups(
    q: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    group_size: int,
    output_dtype: torch.dtype,
) -> Tensor:
    offsets = None if zero_points is None else _column(zero_points)
    reals = _reals(_groups(q, scales, group_size), _column(scales), offsets)
    return aten.to.dtype(aten.reshape.default(reals, [*q.shape]), output_dtype)


def _reals(q: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
    centered = q if zero_points is None else aten.sub.Tensor(q, zero_points)
    return aten.mul.Tensor(centered, scales)


def _along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Scales or zero points, shaped to go with one axis of a tensor."""
    rank = x.dim()
    return aten.reshape.default(values, [-1 if dim == axis % rank else 1 for dim in range(rank)])


def _column(values: Tensor) -> Tensor:
    return aten.reshape.default(values, [-1, 1])


def _groups(x: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Each group in a row of its own. As in torch, one scale a row makes the row the group, however short."""
    row = x.shape[-1]
    is_short = scales.shape[-1] == 1 and group_size > row
    return aten.reshape.default(x, [-1, row if is_short else group_size])


# -- scales that are found as the program runs -------------------------------------------------------------------


def _choose_whole(x: Tensor, qmin: int, qmax: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """torch's choice is float64 and int64, of one element. It leaves an infinite scale infinite."""
    low, high = extremes(x, False)
    span = aten.sub.Tensor(aten.to.dtype(high, x.dtype), aten.to.dtype(low, x.dtype))  # half floats stay such here
    scale = aten.clamp.default(_wide(aten.div.Tensor(span, float(qmax - qmin))), eps)
    offset = aten.clamp.default(aten.rsub.Scalar(aten.round.default(aten.div.Tensor(low, scale)), qmin), qmin, qmax)
    return _one_element(scale, aten.to.dtype(offset, torch.int64))


def _choose_symmetric(x: Tensor, qmin: int, qmax: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low, high = extremes(x, False)
    farthest = aten.to.dtype(aten.maximum.default(aten.neg.default(low), high), x.dtype)
    scale = aten.clamp.default(_wide(aten.div.Tensor(farthest, (qmax - qmin) / 2)), eps)
    middle = 128 if dtype == torch.uint8 else 0
    return _one_element(scale, aten.full_like.default(scale, middle, dtype=torch.int64))


def _one_element(scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
    wide = aten.to.dtype(aten.reshape.default(scale, [1]), torch.float64)
    return wide, aten.reshape.default(zero_point, [1])


def _choose_tokens(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    farthest = aten.amax.default(aten.abs.default(x), [-1], True)
    if x.dtype == torch.float16:
        farthest = aten.to.dtype(farthest, torch.float32)
    scale = aten.div.Tensor(aten.clamp.default(farthest, 1e-5), 127)
    return scale, aten.zeros_like.default(scale)


def _choose_tokens_affine(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The zero point is reckoned from the end where that makes the smaller error; the range is that of int8."""
    zero = aten.new_zeros.default(x, [1])
    low = aten.minimum.default(aten.amin.default(x, [-1], True), zero)
    high = aten.maximum.default(aten.amax.default(x, [-1], True), zero)
    scale = aten.clamp.default(aten.div.Tensor(aten.sub.Tensor(high, low), 255.0), torch.finfo(torch.float32).eps)
    below, above = aten.div.Tensor(low, scale), aten.div.Tensor(high, scale)
    errors = aten.add.Tensor(aten.add.Tensor(below, -128), aten.add.Tensor(above, 127))
    offset = aten.where.self(aten.gt.Scalar(errors, 0), aten.rsub.Scalar(below, -128), aten.rsub.Scalar(above, 127))
    rounded = aten.round.default(aten.clamp.default(offset, -128, 127))
    return aten.to.dtype(scale, torch.float64), aten.to.dtype(rounded, torch.int64)


# -- narrower floats -----------------------------------------------------------------------------------------------


def _quantize_float(x: Tensor, scale: Tensor | None, axis: int | None, dtype: torch.dtype) -> Tensor:
    wide = _wide(x)
    if scale is not None:
        wide = aten.mul.Tensor(wide, aten.reciprocal.default(scale if axis is None else _along(scale, x, axis)))
    largest = torch.finfo(dtype).max
    return aten.to.dtype(aten.clamp.default(wide, -largest, largest), dtype)


def _dequantize_float(q: Tensor, scale: Tensor | None, axis: int | None) -> Tensor:
    wide = _wide(q)
    return wide if scale is None else aten.mul.Tensor(wide, scale if axis is None else _along(scale, q, axis))


SPELLED: dict[str, Callable[..., Any]] = {
    "quantize_per_tensor.default": _quantize_whole,
    "quantize_per_tensor.tensor": _quantize_by_tensors,
    "quantize_per_tensor.tensor2": _quantize_by_tensors,
    "dequantize_per_tensor.default": _dequantize_whole,
    "dequantize_per_tensor.tensor": _dequantize_by_tensors,
    "dequantize_per_tensor.tensor2": _dequantize_by_tensors,
    "quantize_per_channel.default": _quantize_channels,
    "dequantize_per_channel.default": _dequantize_channels,
    "quantize_per_token.default": _quantize_tokens,
    "dequantize_per_token.default": _dequantize_tokens,
    "quantize_per_channel_group.default": _quantize_groups,
    "dequantize_per_channel_group.default": _dequantize_groups,
    "choose_qparams.tensor": _choose_whole,
    "choose_qparams_symmetric.tensor": _choose_symmetric,
    "choose_qparams_per_token.default": _choose_tokens,
    "choose_qparams_per_token_asymmetric.default": _choose_tokens_affine,
    "quantc.choose_qparams.default": choose_qparams,
    "quantc.quantize_float.default": _quantize_float,
    "quantc.dequantize_float.default": _dequantize_float,
}
"""By the name of the op."""
