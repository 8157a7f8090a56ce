"""Integer lowering of sums, means and average pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantc.integer.epilogue import finish, reach
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.integer.ops.reductions import AVERAGED, SUM_OF_ALL, SUM_OVER, SUM_SPANS, SUM_WINDOWS
from quantc.integer.semantics import computes
from quantc.ir.dialect import op_name
from quantc.ir.types import tensor_type

# -- over axes -----------------------------------------------------------------------------------------------------


@computes("sum", formula=SUM_OF_ALL)
def _sum(task: Task) -> None:
    x, dims, _ = _reduction(task)
    head = (x.node, x.grid.one_zero_point, dims, task.argument("keepdim"))
    finish(task, SUM_OVER.target, head, x.grid.scale)


@computes("mean", formula=AVERAGED)
def _mean(task: Task) -> None:
    x, dims, count = _reduction(task)
    head = (x.node, x.grid.one_zero_point, dims, task.argument("keepdim"))
    finish(task, SUM_OVER.target, head, x.grid.scale, divisor=torch.tensor(count))


def _reduction(task: Task) -> tuple[Quantized, list[int], int]:
    """The operand of a sum over axes, these axes, and how many elements each sum has."""
    x = task.whole(task.argument("x"))
    if task.argument("dtype") not in (None, torch.float32):
        raise NotIntegerError(f"its result is {task.argument('dtype')}")
    shape = _shape(x)
    given = task.argument("dim")
    listed = [given] if isinstance(given, int) else list(given or range(len(shape)))
    dims = sorted(dim % len(shape) for dim in listed) if shape else []  # of a single number torch takes 0 and -1
    count = math.prod(_static_sizes([shape[dim] for dim in dims], "how many elements it adds"))
    _check_room(task, x, count)
    return x, dims, count


# -- over windows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """Windows of a pool along one axis: padding before and after, and the divisor of each window."""

    before: int
    after: int
    counts: tuple[int, ...]
    """One number if all count for the same."""


def windows_along(
    size: int | str, kernel: int, stride: int, padding: int, ceil_mode: bool, count_padding: bool
) -> Windows:
    """Windows as in torch: with `ceil_mode` the last may extend beyond the padding, but does not start there; elements
    beyond the padding never count.
    """
    if not ceil_mode and (count_padding or not padding):
        return Windows(padding, padding, (kernel,))
    (known,) = _static_sizes([size], "how much its windows cover")
    free = known + 2 * padding - kernel
    last = -(-free // stride) if ceil_mode else free // stride
    if ceil_mode and last * stride >= known + padding:
        last -= 1
    starts = [number * stride - padding for number in range(last + 1)]
    ends = [min(start + kernel, known + padding) for start in starts]
    if not count_padding:
        starts, ends = [max(start, 0) for start in starts], [min(end, known) for end in ends]
    counts = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Windows(padding, last * stride + kernel - known - padding, counts)


@computes("avg_pool1d", "avg_pool2d", "avg_pool3d", formula=AVERAGED)
def _avg_pool(task: Task) -> None:
    x, rank = task.whole(task.argument("x")), _rank(task)
    kernel = _each(task.argument("kernel_size"), rank)
    stride = _each(task.argument("stride") or kernel, rank)
    padding = _each(task.argument("padding"), rank)
    override = task.argument("divisor_override") if rank > 1 else None
    modes = (task.argument("ceil_mode"), task.argument("count_include_pad") or override is not None)
    sizes = _shape(x)[-rank:]
    axes = [windows_along(*row, *modes) for row in zip(sizes, kernel, stride, padding, strict=True)]
    _check_room(task, x, math.prod(kernel))
    edges = [edge for axis in axes for edge in (axis.before, axis.after)]
    divisor = _counts([axis.counts for axis in axes]) if override is None else torch.tensor(override)
    head = (x.node, x.grid.one_zero_point, kernel, stride, edges)
    finish(task, SUM_WINDOWS.target, head, x.grid.scale, divisor=divisor)


@computes("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", formula=AVERAGED)
def _adaptive_avg_pool(task: Task) -> None:
    x, rank = task.whole(task.argument("x")), _rank(task)
    shape = _shape(x)
    sizes = _static_sizes(shape[-rank:], "how much its windows cover")
    outputs = _static_sizes(_each(task.argument("output_size"), rank), "how many windows it has")
    _check_room(task, x, math.prod(sizes))
    if outputs == [1] * rank:
        head: tuple[Any, ...] = (x.node, x.grid.one_zero_point, list(range(len(shape) - rank, len(shape))), True)
        finish(task, SUM_OVER.target, head, x.grid.scale, divisor=torch.tensor(math.prod(sizes)))
        return
    spans = [_spans(size, count) for size, count in zip(sizes, outputs, strict=True)]
    starts = [task.keep("starts", torch.tensor([start for start, _ in axis])) for axis in spans]
    ends = [task.keep("ends", torch.tensor([end for _, end in axis])) for axis in spans]
    divisor = _counts([[end - start for start, end in axis] for axis in spans])
    finish(task, SUM_SPANS.target, (x.node, x.grid.one_zero_point, starts, ends), x.grid.scale, divisor=divisor)


def _spans(size: int, outputs: int) -> list[tuple[int, int]]:
    """The windows of an adaptive pool along one axis: they cover it evenly, and overlap where it does not divide."""
    return [(number * size // outputs, -(-(number + 1) * size // outputs)) for number in range(outputs)]


def _counts(along: Sequence[Sequence[int]]) -> Tensor:
    """Divisor at each position, from the divisors along each axis; one number if they are equal."""
    total = torch.ones((), dtype=torch.int64)
    for counts in along:
        total = total.unsqueeze(-1) * torch.tensor(list(counts))
    return total.flatten()[0] if bool((total == total.flatten()[0]).all()) else total


# -- what is known -------------------------------------------------------------------------------------------------


def _rank(task: Task) -> int:
    """Over how many axes a pool goes, by its name."""
    return int(op_name(task.core)[-2])


def _each(value: Any, rank: int) -> list[int]:
    """One number for each axis; a single one serves all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _shape(x: Quantized) -> tuple[int | str, ...]:
    kind = tensor_type(x.node)
    if kind is None:
        raise NotIntegerError(f"the shape of {x.node.name} is not known")
    return kind.shape


def _static_sizes(sizes: Sequence[Any], what: str) -> list[int]:
    """Sizes that must be numbers, and not 0."""
    if not all(isinstance(size, int) for size in sizes):
        raise NotIntegerError(f"{what} depends on a size that is dynamic")
    if 0 in sizes:
        raise NotIntegerError("it has no elements")
    return list(sizes)


def _check_room(task: Task, x: Quantized, count: int) -> None:
    """Refuse sums that could leave the accumulator."""
    bits = task.arithmetic.sum_bits
    if reach(x.grid) * count >= 2 ** (bits - 1):
        raise NotIntegerError(f"a sum of {count} elements may leave an int{bits}")
