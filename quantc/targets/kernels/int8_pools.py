"""8-bit pooling and upsampling: max pool, average pool, nearest upsampling.

torch's kernels vectorize over channels in channels-last memory format, where they are several times as fast. So
contiguous inputs are converted first, if they have enough channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from quantc.ir.dialect import argument
from quantc.ir.types import dtype_of, tensor_type
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_elementwise import Rounding, check_bytes, real
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernel
from quantc.targets.kernels.packing import max_of_windows

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels last, by the number of axes."""
MANY_CHANNELS = 32
"""From so many on, images are turned: it takes about half the time that it saves."""


def to_channels_last(x: Tensor) -> Tensor:
    """A batch of images in channels-last memory format, if it has enough channels or is not contiguous; else unchanged."""
    if x.shape[1] < MANY_CHANNELS and x.is_contiguous():
        return x
    made = x.contiguous(memory_format=LAST[x.dim()])
    return made if 1 not in x.shape else _plainly(made)


def _plainly(x: Tensor) -> Tensor:
    """Channels-last images with canonical channels-last strides.

    An axis of size 1 may have any stride. By that alone, some of torch's pools take such images for contiguous.
    """
    strides, step = [0] * x.dim(), 1
    for axis in (1, *range(x.dim() - 1, 1, -1), 0):
        strides[axis] = step
        step *= x.shape[axis]
    return x.as_strided(x.shape, strides)


# -- the largest -------------------------------------------------------------------------------------------------------


class MaxPool(Kernel):
    """Max pool over one or two axes. torch's pool of plain uint8 refuses channels-last images."""

    name: ClassVar[str] = "quantized max_pool2d"
    any_order: ClassVar[bool] = True

    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.window = window

    def pack(self) -> Any:
        return self.window

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        made = max_of_windows(to_channels_last(x if x.dim() == 4 else x[None]), *packed)
        made = made if x.dim() == 4 else made[0]
        return made.contiguous() if self.in_order else made


class MaxPool3d(Kernel):
    """3D max pool as two 2D pools, first within images, then along the depth, both channels last.

    torch's pool of plain uint8 refuses channels-last tensors and is slower than the float one.
    """

    name: ClassVar[str] = "quantized max_pool2d, twice"
    any_order: ClassVar[bool] = True

    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.window = window

    def pack(self) -> Any:
        *sizes, ceil = self.window
        images = [list(item[1:]) for item in sizes]
        # along the third axis: one row a place, so that nothing is done along the other
        neutral = (1, 1, 0, 1)
        stacks = [[item[0], other] for item, other in zip(sizes, neutral, strict=True)]
        return (*images, ceil), (*stacks, ceil)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        images, stacks = packed
        x = inputs[0] if inputs[0].dim() == 5 else inputs[0][None]
        batch, channels, depth = x.shape[:3]
        # N, D, H, W, C in memory is a batch of N·D images, and N images whose rows are images
        lying = x.permute(0, 2, 3, 4, 1).flatten(0, 1)
        wide = max_of_windows(_plainly(lying.contiguous().permute(0, 3, 1, 2)), *images)
        height, width = wide.shape[2:]
        rows = wide.permute(0, 2, 3, 1).reshape(batch, depth, height * width, channels)
        deep = max_of_windows(_plainly(rows.permute(0, 3, 1, 2)), *stacks)
        made = deep.reshape(batch, channels, -1, height, width)
        made = made if inputs[0].dim() == 5 else made[0]
        return made.contiguous() if self.in_order else made


@kernel("x86", "max_pool2d", "max_pool3d")
def max_pool(call: Call) -> Kernel:
    check_bytes(call.node.args[0])
    axes = int(call.op[-2])
    size, stride, padding, dilation, ceil = (
        argument(call.node, name) for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    )
    window = [_each(item, axes) for item in (size, stride or size, padding, dilation)]
    return (MaxPool if axes == 2 else MaxPool3d)(*window, ceil)


def _each(value: Any, axes: int) -> list[int]:
    """One number for each axis; a single one serves all."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * (axes // len(values))


# -- averages ----------------------------------------------------------------------------------------------------------

POOLS: dict[int, Any] = {2: functional.avg_pool2d, 3: functional.avg_pool3d}
ADAPTIVE: dict[int, Any] = {2: functional.adaptive_avg_pool2d, 3: functional.adaptive_avg_pool3d}
"""By the number of axes; pools along one axis go over images of one row."""


class AveragePool(Rounding):
    """Average pool: window sums in float32, which are exact, rescaled to the result."""

    name: ClassVar[str] = "float32 avg_pool"

    def __init__(self, zero_point: int, window: tuple[Sequence[int], ...], multiplier: Tensor, ending: Ending) -> None:
        super().__init__(ending)
        self.zero_point = zero_point
        self.window = window
        self.register_buffer("multiplier", multiplier.float())

    def pack(self) -> Any:
        super().pack()
        size, stride, edges = (list(item) for item in self.window)
        multiplier = self.get_buffer("multiplier")
        is_row = len(size) == 1
        if is_row:
            size, stride, edges = [1, *size], [1, *stride], [0, 0, *edges]
            multiplier = multiplier if multiplier.numel() == 1 else multiplier.unsqueeze(-2)
        before, after = edges[::2], edges[1::2]
        # torch pads both sides alike, by half a window at most
        is_even = before == after and all(0 <= 2 * edge <= length for edge, length in zip(before, size, strict=True))
        padding = before if is_even else [0] * len(size)
        added = None if is_even else [edge for pair in reversed(list(zip(before, after, strict=True))) for edge in pair]
        by_place = None if multiplier.numel() == 1 else multiplier
        scale = 1.0 if by_place is not None else 1.0 / float(multiplier)
        return is_row, POOLS[len(size)], (size, stride, padding), added, by_place, scale

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        is_row, pool, (size, stride, padding), added, by_place, scale = packed
        x = inputs[0].unsqueeze(-2) if is_row else inputs[0]
        is_batch = x.dim() == len(size) + 2
        values = real(to_channels_last(x if is_batch else x[None]), 1.0, self.zero_point)
        if added is not None:
            values = functional.pad(values, added)
        sums = pool(values, size, stride, padding, divisor_override=1)
        if by_place is not None:
            sums.mul_(by_place)
        elif self.ending.is_float:
            sums.div_(scale)
        made = self.settled(sums, scale)
        made = made if is_batch else made[0]
        return made.squeeze(-2) if is_row else made


@kernel("x86", "sum_windows")
def average_pool(call: Call) -> Kernel:
    check_bytes(call.node.args[0])
    window = (call["kernel"], call["stride"], call["padding"])
    return AveragePool(call["x_zero_point"], window, call.tensor("multiplier"), Ending.of(call))


class AdaptivePool(Rounding):
    """Adaptive average pool in float32."""

    name: ClassVar[str] = "float32 adaptive_avg_pool"

    def __init__(self, zero_point: int, outputs: Sequence[int], scale: float, ending: Ending) -> None:
        super().__init__(ending)
        self.zero_point, self.outputs, self.scale = zero_point, tuple(outputs), scale

    def pack(self) -> Any:
        super().pack()
        outputs = self.outputs
        is_row = len(outputs) == 1
        return is_row, ADAPTIVE[2 if is_row else len(outputs)], [1, *outputs] if is_row else [*outputs]

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        is_row, pool, outputs = packed
        x = inputs[0].unsqueeze(-2) if is_row else inputs[0]
        made = self.settled(pool(real(x, self.scale, self.zero_point), outputs))
        return made.squeeze(-2) if is_row else made


@kernel("x86", "sum_spans")
def adaptive_pool(call: Call) -> Placement:
    x: Any = call.node.args[0]
    check_bytes(x)
    kind = tensor_type(x)
    bounds: Any = call.node.args[2:4]
    spans = [tuple(call.program.tensor(node) for node in nodes) for nodes in zip(*bounds, strict=True)]
    sizes = [] if kind is None else kind.shape[-len(spans) :]
    counts = torch.ones((), dtype=torch.float64)
    for size, (start, end) in zip(sizes, spans, strict=True):
        if start is None or end is None or not isinstance(size, int) or not _is_even(size, start, end):
            raise NoKernelError("its windows are not those of torch's adaptive pools")
        counts = counts.unsqueeze(-1) * (end - start)
    # the multiplier includes the division by the number of elements, which the pool does itself
    scales = call.tensor("multiplier") * counts
    scale = float(scales.flatten()[0])
    if not bool(torch.isclose(scales, torch.tensor(scale, dtype=torch.float64), rtol=1e-12, atol=0).all()):
        raise NoKernelError("its multiplier is not that of an average")
    outputs = [len(start) for start, _ in spans if start is not None]
    return Placement(AdaptivePool(call["x_zero_point"], outputs, scale, Ending.of(call)), (x,))


def _is_even(size: int, starts: Tensor, ends: Tensor) -> bool:
    """True if spans are those of torch's adaptive pools: evenly spaced, overlapping where sizes do not divide."""
    count = len(starts)
    expected = [(place * size // count, math.ceil((place + 1) * size / count)) for place in range(count)]
    return list(zip(starts.tolist(), ends.tolist(), strict=True)) == expected


# -- larger images -----------------------------------------------------------------------------------------------------


class Repeat(Kernel):
    """Nearest upsampling, channels last: contiguous takes twenty times as long."""

    name: ClassVar[str] = "upsample_nearest, channels last"
    any_order: ClassVar[bool] = True

    def __init__(self, axes: int, *sizes: Any) -> None:
        super().__init__()
        self.axes, self.sizes = axes, sizes

    def pack(self) -> Any:
        return REPEATS[self.axes], self.sizes

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        repeat, sizes = packed
        made: Tensor = repeat(to_channels_last(inputs[0]), *sizes)
        return made.contiguous() if self.in_order else made


REPEATS: dict[int, Any] = {2: torch.ops.aten.upsample_nearest2d.vec, 3: torch.ops.aten.upsample_nearest3d.vec}


@kernel("x86", "upsample_nearest2d", "upsample_nearest3d")
def upsample(call: Call) -> Kernel:
    if dtype_of(call.node.args[0]) is not torch.uint8:
        raise NoKernelError("the kernel is for uint8")
    if len(call.node.all_input_nodes) > 1:
        raise NoKernelError("how large it becomes is not known before it runs")
    return Repeat(int(call.op[-2]), argument(call.node, "output_size"), argument(call.node, "scale_factors"))
