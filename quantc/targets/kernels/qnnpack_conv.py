"""Int8 convolutions on QNNPACK. First layers of image models have few channels and wide windows, which the kernels
handle badly: there the rows of a window are laid out as channels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.errors import InputError
from quantc.targets.kernels.conv_window import FORMATS, Window
from quantc.targets.kernels.int8_conv_transpose import Spreading
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.qnnpack_layer import QnnpackLayer, QnnpackProduct


class QnnpackConv(QnnpackProduct):
    """Convolution over one, two or three axes, or transposed convolution."""

    name: ClassVar[str] = "QNNPACK conv"

    def __init__(self, layer: QnnpackLayer) -> None:
        super().__init__(layer)
        self.axes = layer.levels.dim() - 2
        self.kernel_size = tuple(layer.levels.shape[2:])

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = self.unsigned(inputs[0])
        is_batch = x.dim() == self.axes + 2
        x = x if is_batch else x.unsqueeze(0)
        self._check(x)
        made = self.convolved(packed, x)
        made = made if is_batch else made.squeeze(0)
        return made.contiguous() if self.in_order else made

    def convolved(self, packed: Any, x: Tensor) -> Tensor:
        """Convolution of a batch."""
        order = FORMATS.get(self.axes, torch.contiguous_format)
        return self.multiplied(packed, x.contiguous(memory_format=order))

    def _check(self, x: Tensor) -> None:
        """The kernels would read beyond the end of a tensor with too few channels."""
        if x.dim() != self.axes + 2 or x.shape[1] != self.sizes[0]:
            raise InputError(
                f"{self.name} was given a tensor of shape {tuple(x.shape)}, and goes over {self.axes} axes of "
                f"{self.sizes[0]} channels",
                where="what it reads",
                advice="call the lowered module with inputs of the shapes it was captured for",
            )

    def work(self, *inputs: Tensor) -> Work | None:
        shape = inputs[0].shape
        if self.op.startswith("conv_transpose"):
            batch = shape[0] if len(shape) == self.axes + 2 else 1
            taps = "x".join(map(str, self.kernel_size))
            return Work(f"{self.op} {taps}", batch * math.prod(shape[-self.axes :]), self.sizes, str(self.window))
        read, made = self.sizes
        return Window(*self.window).work(shape, (made, read // self.window[-1], *self.kernel_size))


OWN_TRANSPOSED = (1, 2)
"""Over how many axes QNNPACK's own transposed convolutions go, and are right."""
LANES = 8
"""Number of channels that the kernels read at once; fewer take as long."""
MIN_GAIN = 2
"""Minimum factor by which reads must shrink for the rows to be worth the copy."""
MIN_CHANNELS = 32
"""Minimum number of results at each position: they share the copy."""


class ConvOfRows(QnnpackConv):
    """Convolution with each window row laid out as channels: they are adjacent in memory, and the kernels read eight
    channels in the time of one.
    """

    name: ClassVar[str] = "QNNPACK conv of rows"

    def as_packed(self) -> tuple[Tensor, tuple[Any, ...]]:
        weight, (stride, _, dilation, groups) = self.get_buffer("weight"), self.window
        made, read, high, wide = weight.shape
        rows = weight.permute(0, 3, 1, 2).reshape(made, wide * read, high, 1)
        return rows, ([stride[0], 1], [0, 0], [dilation[0], 1], groups)

    def as_given(self, weight: Tensor) -> Tensor:
        (read, made), (high, wide) = self.sizes, self.kernel_size
        return weight.reshape(made, wide, read, high).permute(0, 2, 3, 1).contiguous()

    def convolved(self, packed: Any, x: Tensor) -> Tensor:
        (_, step), (above, beside), *_ = self.window
        batch, channels, high, wide = x.shape
        tall, broad, row = high + 2 * above, wide + 2 * beside, self.kernel_size[1]
        padded = x.new_full((batch, tall, broad, channels), self.x_zero_point)
        padded[:, above : above + high, beside : beside + wide] = x.permute(0, 2, 3, 1)
        strides = (tall * broad * channels, broad * channels, step * channels, 1)
        rows = padded.as_strided((batch, tall, (broad - row) // step + 1, row * channels), strides).contiguous()
        return self.multiplied(packed, rows.permute(0, 3, 1, 2))


class ConvSpread(QnnpackConv):
    """Transposed convolution as an ordinary one, with an output per phase of the stride.

    QNNPACK's own take two to four times as long with more than one phase; over three axes they are wrong.
    """

    name: ClassVar[str] = "QNNPACK conv, spread"

    def __init__(self, layer: QnnpackLayer, spreading: Spreading) -> None:
        ending, bias, outputs = layer.ending, layer.bias, layer.channels
        ordinary = replace(
            layer,
            op=f"conv{spreading.axes}d",
            levels=spreading.rows(layer.levels),
            ending=replace(ending, multiplier=spreading.for_places(ending.multiplier.expand(outputs))),
            bias=None if bias is None else spreading.for_places(bias.reshape(-1).expand(outputs)),
            window=spreading.window.arguments,
        )
        super().__init__(ordinary)
        self.spreading = spreading
        self.register_buffer("weight", layer.levels)

    def as_packed(self) -> tuple[Tensor, tuple[Any, ...]]:
        return self.spreading.rows(self.get_buffer("weight")), self.window

    def as_given(self, weight: Tensor) -> Tensor:
        return self.spreading.weight(weight)

    def convolved(self, packed: Any, x: Tensor) -> Tensor:
        return self.spreading.side_by_side(super().convolved(packed, x))

    def work(self, *inputs: Tensor) -> Work | None:
        return self.spreading.work(inputs[0].shape)


# -- makers --------------------------------------------------------------------------------------------------------


@kernel("qnnpack", "conv")
def conv_of_rows(call: Call) -> Kernel:
    layer = conv_layer(call)
    if not _pays(layer):
        raise NoKernelError("windows are taken by rows where they are wide, and channels few")
    return ConvOfRows(layer)


def _pays(layer: QnnpackLayer) -> bool:
    """True if laying out rows as channels saves more than it costs."""
    made, read, *window = layer.levels.shape
    if layer.op != "conv2d" or layer.window[-1] != 1 or layer.window[2][1] != 1 or made < MIN_CHANNELS:
        return False
    wide = window[1]
    return wide * _blocks(read) >= MIN_GAIN * _blocks(wide * read)


def _blocks(channels: int) -> int:
    return -(-channels // LANES)


@kernel("qnnpack", "conv")
def conv(call: Call) -> Kernel:
    return QnnpackConv(conv_layer(call))


@kernel("qnnpack", "conv_transpose")
def conv_spread(call: Call) -> Kernel:
    spreading, weight = Spreading.of(call), call.tensor("w")
    if weight.dtype is not torch.int8 or call["w_zero_point"] is not None:
        raise NoKernelError("weights with zero points cannot be spread: there are zeros between their taps")
    if spreading.axes in OWN_TRANSPOSED and set(spreading.stride) == {1}:
        raise NoKernelError("nothing is spread with a stride of 1")
    return ConvSpread(
        QnnpackLayer.of(call, f"conv_transpose{spreading.axes}d", weight, None, call["groups"]), spreading
    )


@kernel("qnnpack", "conv_transpose")
def conv_transpose(call: Call) -> Kernel:
    weight, spreading = call.tensor("w"), Spreading.of(call)
    if spreading.axes not in OWN_TRANSPOSED:
        raise NoKernelError("QNNPACK's own transposed convolutions over three axes are wrong")
    given = (spreading.stride, spreading.padding, spreading.output_padding, spreading.dilation)
    window = (*map(list, given), spreading.groups)
    return QnnpackConv(QnnpackLayer.of(call, f"conv_transpose{spreading.axes}d", weight, call["w_zero_point"], *window))


def conv_layer(call: Call) -> QnnpackLayer:
    """Layer of an ordinary convolution."""
    weight = call.tensor("w")
    axes = weight.dim() - 2
    return QnnpackLayer.of(call, f"conv{axes}d", weight, call["w_zero_point"], *Window.of(call, axes).arguments)
