"""The grid (qparams) of a quantized tensor: the real number that each integer represents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.program import Program
from quantc.qdq.ops import is_dequantize, is_quantize


@dataclass(frozen=True, eq=False)
class Grid:
    """`real = (q - zero_point) * scale`, with `q` in `qmin..qmax`. Scales are float32 values, kept as float64."""

    scale: Tensor
    """0-dimensional, one element a channel, or for a matrix in groups one element a row and group."""
    zero_point: Tensor
    """int64, of the same shape."""
    qmin: int
    qmax: int
    dtype: torch.dtype
    axis: int | None = None
    """Axis of per-channel scales; None for one scale. The groups of a matrix are on axis 1."""
    group: int | None = None
    """Elements of a row per scale; None without groups."""

    @property
    def is_whole(self) -> bool:
        """True if the grid is per tensor."""
        return self.axis is None

    @property
    def one_scale(self) -> float:
        return float(self.scale.item())

    @property
    def one_zero_point(self) -> int:
        return int(self.zero_point.item())

    def equals(self, other: Grid) -> bool:
        mine = (self.qmin, self.qmax, self.dtype, self.axis, self.group)
        return (
            mine == (other.qmin, other.qmax, other.dtype, other.axis, other.group)
            and torch.equal(self.scale, other.scale)
            and torch.equal(self.zero_point, other.zero_point)
        )

    def level(self, real: float) -> int:
        """Integer nearest to a real number, within the range: for clamp bounds."""
        nearest = torch.round(torch.tensor(real, dtype=torch.float64) / self.scale) + self.zero_point
        return int(nearest.clamp(self.qmin, self.qmax).item())


def grid_of(program: Program, node: fx.Node) -> Grid | None:
    """Grid of a quantize or dequantize node; None if its qparams are not static."""
    if not (is_quantize(node) or is_dequantize(node)):
        return None
    name, group = str(node.target), None
    if "per_tensor" in name:
        scale, zero_point, qmin, qmax, dtype = _values(program, node.args[1:6])
        axis = None
    elif "per_channel." in name:
        scale, zero_point, axis, qmin, qmax, dtype = _values(program, node.args[1:7])
    elif "per_channel_group" in name:
        scale, zero_point, qmin, qmax, dtype, group = _values(program, node.args[1:7])
        axis = 1
    else:
        return None
    if scale is None:
        return None
    scales = torch.as_tensor(scale, dtype=torch.float32).double()
    zeros = torch.zeros_like(scales) if zero_point is None else torch.as_tensor(zero_point)
    return Grid(scales, zeros.to(torch.int64), qmin, qmax, dtype, axis, group)


def _values(program: Program, arguments: tuple[Any, ...]) -> list[Any]:
    return [program.tensor(item) if isinstance(item, fx.Node) else item for item in arguments]
