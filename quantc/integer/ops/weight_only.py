"""Weight-only ops: quantized weights, float computation.

Each is equivalent, bit for bit, to a dequantize op and an op of the model in the Q/DQ form. As one op it can go to a
kernel that never dequantizes the weight, or does so once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantc.integer.library import integer_op
from quantc.spec.aten_arithmetic import aten

STORED = "Tensor w, Tensor? scale, Tensor? zero_point, int? axis, int? group_size"
"""A stored weight. It has no scale, one, one for each index of an axis, or one for each group of a row."""
LAYOUT = "int[]? shape, int[]? order"
"""Shape of a weight stored as a matrix: reshape, then permute the axes."""
REAL = "w = f32(wq − wz) · sw in float32"
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Formats of which torch moves rows only as bytes."""


def stored_weight(
    w: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    axis: int | None,
    group_size: int | None,
    shape: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> Tensor:
    """The dequantized float32 weight."""
    levels = w if group_size is None else aten.reshape.default(w, [-1, _group(w, scale, group_size)])
    real = _dequantize(levels, *(_beside(part, levels, axis, group_size) for part in (scale, zero_point)))
    if group_size is not None:
        real = aten.reshape.default(real, [*w.shape])
    if shape is not None:
        real = aten.reshape.default(real, [*shape])
    return real if order is None else aten.permute.default(real, [*order])


def _group(w: Tensor, scale: Tensor | None, group_size: int) -> int:
    """The length of a group. As in torch, one scale a row makes the row the group, however short."""
    row: int = w.shape[-1]
    return row if scale is not None and scale.shape[-1] == 1 and group_size > row else group_size


def _beside(values: Tensor | None, levels: Tensor, axis: int | None, group_size: int | None) -> Tensor | None:
    """Scales or zero points, shaped to broadcast with their weight."""
    if values is None or (axis is None and group_size is None):
        return values
    if group_size is not None:
        return aten.reshape.default(values, [-1, 1])
    rank = levels.dim()
    return aten.reshape.default(values, [-1 if dim == (axis or 0) % rank else 1 for dim in range(rank)])


def _dequantize(levels: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    real: Tensor = aten.to.dtype(levels, torch.float32)
    if zero_point is not None:
        real = aten.sub.Tensor(real, aten.to.dtype(zero_point, torch.float32))
    return real if scale is None else aten.mul.Tensor(real, scale)


@integer_op(f"stored_weight({STORED}, {LAYOUT}) -> Tensor", formula=REAL)
def stored_weight_op(
    w: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    axis: int | None,
    group_size: int | None,
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
) -> Tensor:
    """A quantized weight, dequantized to float32."""
    return stored_weight(w, scale, zero_point, axis, group_size, shape, order)


@integer_op(
    f"linear_weight_only(Tensor x, {STORED}, {LAYOUT}, Tensor? bias, bool transposed) -> Tensor",
    formula=f"{REAL}; out = Σ x · w + b in float32",
)
def linear_weight_only(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    axis: int | None,
    group_size: int | None,
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
    bias: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Linear or matmul by a quantized weight, computed in float.

    With `transposed` the weight is the second operand of a matmul, with outputs on its last axis.
    """
    real = stored_weight(w, scale, zero_point, axis, group_size, shape, order)
    return product(x, real, bias, transposed)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The op of the Q/DQ form."""
    made: Tensor
    if not transposed:
        made = aten.linear.default(x, weight, bias)
    elif bias is None:
        made = aten.matmul.default(x, weight)
    else:
        made = aten.addmm.default(bias, x, weight)
    return made


# -- tables ------------------------------------------------------------------------------------------------------------


def looked_up(table: Tensor, indices: Tensor) -> Tensor:
    """Rows of a table, in its own dtype."""
    if table.dtype not in BYTES:
        return aten.embedding.default(table, indices)
    rows = aten.embedding.default(aten.view.dtype(table, torch.uint8), indices)
    return aten.view.dtype(rows, table.dtype)


def real_rows(
    rows: Tensor, scale: Tensor | None, zero_point: Tensor | None, indices: Tensor, axis: int | None, grouped: bool
) -> Tensor:
    """Dequantized rows of a table; scales and zero points are those of the whole table."""
    if grouped and scale is not None:
        count = scale.shape[-1]
        split = aten.reshape.default(rows, [*rows.shape[:-1], count, rows.shape[-1] // count])
        parts = [None if part is None else looked_up(part, indices) for part in (scale, zero_point)]
        real = _dequantize(split, *(None if part is None else aten.unsqueeze.default(part, -1) for part in parts))
        return aten.reshape.default(real, [*rows.shape])
    if axis != 0:
        return _dequantize(rows, scale, zero_point)
    columns = [None if part is None else aten.reshape.default(part, [-1, 1]) for part in (scale, zero_point)]
    return _dequantize(rows, *(None if part is None else looked_up(part, indices) for part in columns))


@integer_op(
    f"embedding_weight_only({STORED}, Tensor indices) -> Tensor",
    formula=f"{REAL}, of the rows that are looked up",
)
def embedding_weight_only(
    w: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    axis: int | None,
    group_size: int | None,
    indices: Tensor,
) -> Tensor:
    """Rows of a quantized table, in any format, as float32."""
    return real_rows(looked_up(w, indices), scale, zero_point, indices, axis, group_size is not None)


def bags(
    rows: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding: int | None,
) -> Tensor:
    """`embedding_bag` on rows that are already looked up, one per index; `padding` is an index that is left out."""
    count = len(indices)
    places = torch.arange(count, dtype=indices.dtype, device=indices.device)
    if padding is not None:
        places = torch.where(indices == padding, count, places)
    if padding is not None or not count:
        rows = torch.cat([rows, rows.new_zeros([1, rows.shape[-1]])])
    left_out = None if padding is None else count
    made: Tensor = torch.ops.aten.embedding_bag.padding_idx(
        rows, places, offsets, False, mode, False, per_sample_weights, include_last_offset, left_out
    )[0]
    return made


def _embedding_bag_by_rows(
    w: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    axis: int | None,
    group_size: int | None,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    rows = embedding_weight_only(w, scale, zero_point, axis, group_size, indices)
    padding = (
        None if padding_idx is None else padding_idx % len(w)
    )  # as in torch, counted from the end if it is below 0
    return bags(rows, indices, offsets, mode, per_sample_weights, include_last_offset, padding)


@integer_op(
    f"embedding_bag_weight_only({STORED}, Tensor indices, Tensor offsets, int mode, Tensor? per_sample_weights, "
    "bool include_last_offset, int? padding_idx) -> Tensor",
    formula=f"{REAL}; out = the sum, mean or maximum of each bag of rows in float32",
    kernel=_embedding_bag_by_rows,
)
def embedding_bag_weight_only(
    w: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    axis: int | None,
    group_size: int | None,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """Sums, means or maxima of rows of a quantized table."""
    table = stored_weight(w, scale, zero_point, axis, group_size)
    made: Tensor = aten.embedding_bag.padding_idx(
        table, indices, offsets, False, mode, False, per_sample_weights, include_last_offset, padding_idx
    )[0]
    return made
