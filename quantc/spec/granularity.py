"""Granularity: views and reductions over the elements that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from quantc.errors import DataError
from quantc.spec.formats import PerChannel, PerGroup, PerTensor, PerToken

Share = PerTensor | PerChannel | PerGroup | PerToken


def normal_axis(axis: int, rank: int, *, where: str = "") -> int:
    """An axis as a non-negative index. DataError if the tensor has no such axis."""
    if not -rank <= axis < rank:
        raise DataError(
            f"a tensor of {rank} dimensions has no axis {axis}",
            where=where or None,
            advice="correct the axis of the spec's granularity",
        )
    return axis % rank


def group_view(x: Tensor, share: PerGroup, *, where: str = "") -> tuple[Tensor, int]:
    """`x` with its axis split into (groups, group size), and the index of the group-size axis."""
    axis = normal_axis(share.axis, x.dim(), where=where)
    length = x.shape[axis]
    if length % share.size:
        raise DataError(
            f"groups of {share.size} do not divide the {length} elements along axis {axis}",
            where=where or None,
            advice=f"choose a group size that divides {length}",
        )
    split = (*x.shape[:axis], length // share.size, share.size, *x.shape[axis + 1 :])
    return x.reshape(split), axis + 1


def in_memory_order(x: Tensor) -> Tensor:
    """All elements, flat, in memory order: no copy for permuted tensors."""
    if x.is_contiguous():
        return x.reshape(-1)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    return x.permute(order).reshape(-1)


def extremes(x: Tensor, share: Share, *, where: str = "") -> tuple[Tensor, Tensor]:
    """Minimum and maximum over each set of elements that share a scale; NaN if it contains one."""
    if isinstance(share, PerTensor):
        low, high = torch.aminmax(in_memory_order(x))
        return low, high
    if isinstance(share, PerChannel):
        axis = normal_axis(share.axis, x.dim(), where=where)
        if x.dim() == 1:
            return x, x
        others = [dim for dim in range(x.dim()) if dim != axis]
        return torch.amin(x, others), torch.amax(x, others)
    if isinstance(share, PerGroup):
        view, axis = group_view(x, share, where=where)
        low, high = torch.aminmax(view, dim=axis)
        return low, high
    normal_axis(-1, x.dim(), where=where)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    return low, high


def as_rows(x: Tensor, share: Share, *, where: str = "") -> Tensor:
    """`x` as a matrix, one row for each set of elements that share a scale."""
    if isinstance(share, PerTensor):
        return x.reshape(1, -1)
    if isinstance(share, PerChannel):
        axis = normal_axis(share.axis, x.dim(), where=where)
        return x.movedim(axis, 0).reshape(x.shape[axis], -1)
    if isinstance(share, PerGroup):
        view, axis = group_view(x, share, where=where)
        return view.movedim(axis, -1).reshape(-1, share.size)
    normal_axis(-1, x.dim(), where=where)
    return x.reshape(-1, x.shape[-1])


def shared_shape(shape: torch.Size, share: Share, *, where: str = "") -> torch.Size:
    """The shape of the scales for a tensor shape."""
    if isinstance(share, PerTensor):
        return torch.Size(())
    if isinstance(share, PerToken):
        normal_axis(-1, len(shape), where=where)
        return torch.Size((*shape[:-1], 1))
    axis = normal_axis(share.axis, len(shape), where=where)
    if isinstance(share, PerChannel):
        return torch.Size((shape[axis],))
    group_view(torch.empty(shape, device="meta"), share, where=where)
    return torch.Size((*shape[:axis], shape[axis] // share.size, *shape[axis + 1 :]))
