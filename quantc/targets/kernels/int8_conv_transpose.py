"""Int8 transposed convolutions, run as ordinary convolutions.

Each becomes a convolution with one output per phase of the stride: with stride 2 on two axes, four times the outputs,
interleaved afterwards. So they support everything that ordinary ones do. onednn's own kernels are not reachable from
torch; fbgemm's have one scale for the whole weight, and were measured two to ten times slower, except for windows that
do not overlap.

For positions t = stride·q + r on an axis, and taps κ = stride·j + r of the weight W:

    result[t] = Σ_j x[q − j] · W[stride·j + r]

which is, for each phase r, a convolution by the flipped taps of W that are `stride` apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from quantc.targets.kernels.conv_window import Window, kind_of
from quantc.targets.kernels.fbgemm_conv import ROUNDED_BITS, ConvFbgemm, fbgemm_ending
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_conv import Conv
from quantc.targets.kernels.int8_conv_base import ByteConv, check_bytes, symmetric, two_axes
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel


@dataclass(frozen=True)
class Spreading:
    """Parameters of a transposed convolution, by spatial axis."""

    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    inputs: int
    """Of a group."""
    outputs: int
    """Of a group."""

    @staticmethod
    def of(call: Call) -> Spreading:
        weight, groups = call.tensor("w"), call["groups"]
        axes = weight.dim() - 2
        names = ("stride", "padding", "output_padding", "dilation")
        given = [tuple(call[name]) * (axes if len(call[name]) == 1 else 1) for name in names]
        if any(not isinstance(size, int) for sizes in given for size in sizes):
            raise NoKernelError("its window is not known before it runs")
        stride, padding, output_padding, dilation = given
        channels = (groups, weight.shape[0] // groups, weight.shape[1])
        return Spreading(tuple(weight.shape[2:]), stride, padding, output_padding, dilation, *channels)

    @property
    def axes(self) -> int:
        return len(self.taps)

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Dilated kernel size: from the first tap to the last."""
        return tuple(gap * (k - 1) + 1 for gap, k in zip(self.dilation, self.taps, strict=True))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Input elements per result, by axis."""
        return tuple(-(-reach // stride) for reach, stride in zip(self.reach, self.stride, strict=True))

    @cached_property
    def window(self) -> Window:
        """Window of the equivalent ordinary convolution, padded to cover all results."""
        each = zip(self.reach, self.stride, self.padding, self.output_padding, self.steps, strict=True)
        around = [max(0, (reach - 1 + out - pad) // s, steps - 1 - pad // s) for reach, s, pad, out, steps in each]
        return Window([1] * self.axes, around, [1] * self.axes, self.groups)

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Output sizes on the spatial axes."""
        each = zip(sizes, self.stride, self.padding, self.reach, self.output_padding, strict=True)
        return [(n - 1) * s - 2 * pad + reach + out for n, s, pad, reach, out in each]

    def work(self, shape: Sequence[int]) -> Work:
        """Workload of an input."""
        batch = shape[0] if len(shape) == self.axes + 2 else 1
        pixels = batch * math.prod(self.sizes(shape[-self.axes :]))
        channels = (self.groups * self.inputs, self.groups * self.outputs)
        rest = f"{self.groups} groups" if self.groups > 1 else ""
        return Work(kind_of("conv_transpose", self.taps, self.stride, self.groups, self.inputs), pixels, channels, rest)

    # -- the weight ------------------------------------------------------------------------------------------------

    def rows(self, weight: Tensor) -> Tensor:
        """The weight `[groups·inputs, outputs, *taps]` as that of the ordinary convolution."""
        axes = range(self.axes)
        spaced = weight.new_zeros(*weight.shape[:2], *self._tap_span())
        spaced[self._taps()] = weight
        split = [size for pair in zip(self.steps, self.stride, strict=True) for size in pair]
        parts = spaced.reshape(self.groups, self.inputs, self.outputs, *split)
        places, steps = [4 + 2 * axis for axis in axes], [3 + 2 * axis for axis in axes]
        turned = parts.permute(0, *places, 2, 1, *steps).flip([3 + self.axes + axis for axis in axes])
        return turned.reshape(self.groups * math.prod(self.stride) * self.outputs, self.inputs, *self.steps)

    def weight(self, rows: Tensor) -> Tensor:
        """Inverse of `rows`: the original weight."""
        axes, many = range(self.axes), self.axes
        parts = rows.reshape(self.groups, *self.stride, self.outputs, self.inputs, *self.steps)
        straight = parts.flip([3 + many + axis for axis in axes])
        pairs = [place for axis in axes for place in (3 + many + axis, 1 + axis)]
        spaced = straight.permute(0, 2 + many, 1 + many, *pairs)
        return spaced.reshape(-1, self.outputs, *self._tap_span())[self._taps()]

    def _tap_span(self) -> list[int]:
        """Number of taps by axis, dilation and trailing zeros included."""
        return [steps * s for steps, s in zip(self.steps, self.stride, strict=True)]

    def _taps(self) -> tuple[slice, ...]:
        """Slices of the weight with zeros inserted that hold the taps."""
        each = zip(self.reach, self.dilation, strict=True)
        return (slice(None), slice(None), *(slice(0, reach, gap) for reach, gap in each))

    def for_places(self, values: Tensor) -> Tensor:
        """Per-output values, repeated for each phase of the ordinary convolution."""
        each = values.reshape(self.groups, 1, self.outputs)
        return each.expand(-1, math.prod(self.stride), -1).reshape(-1).contiguous()

    # -- the result ------------------------------------------------------------------------------------------------

    def side_by_side(self, made: Tensor) -> Tensor:
        """Interleave the phases of the ordinary convolution into the result."""
        axes = range(self.axes)
        batch, across = made.shape[0], made.shape[2:]
        parts = made.movedim(1, -1).reshape(batch, *across, self.groups, *self.stride, self.outputs)
        first = 2 + self.axes  # of the places
        pairs = [place for axis in axes for place in (1 + axis, first + axis)]
        together = parts.permute(0, *pairs, 1 + self.axes, first + self.axes)
        whole = [n * s for n, s in zip(across, self.stride, strict=True)]
        wide = together.reshape(batch, *whole, self.groups * self.outputs).movedim(-1, 1)
        around = self.window.padding
        read = [n - 2 * beyond + steps - 1 for n, beyond, steps in zip(across, around, self.steps, strict=True)]
        each = zip(self.padding, self.steps, around, self.stride, self.sizes(read), strict=True)
        for axis, (pad, steps, beyond, s, size) in enumerate(each):
            start = pad - (steps - 1 - beyond) * s
            if (start, size) != (0, wide.shape[2 + axis]):
                wide = wide.narrow(2 + axis, start, size)
        return wide


class Spread(ByteConv):
    """Mixin that runs a transposed convolution as an ordinary one; put it before that one's class."""

    spreading: Spreading
    outputs_axis: ClassVar[int] = 1

    def takes_quantized(self, rank: int) -> bool:
        return False

    @property
    def gives_quantized(self) -> bool:
        return False  # results are put side by side as plain bytes

    def _window(self, call: Call) -> Window:
        self.spreading = Spreading.of(call)
        return self.spreading.window

    def _by_output(self, values: Tensor) -> Tensor:
        return self.spreading.for_places(values.expand(self.spreading.groups * self.spreading.outputs))

    def rows(self) -> Tensor:
        return two_axes(self.spreading.rows(self.levels()))

    def levels_of(self, rows: Tensor) -> Tensor:
        return self.spreading.weight(rows).reshape(self.shape)

    def finished(self, made: Tensor) -> Tensor:
        return self.spreading.side_by_side(super().finished(made))

    def of_nothing(self, x: Tensor) -> Tensor:
        spreading = self.spreading
        sizes = spreading.sizes(x.shape[2:])
        return x.new_zeros(x.shape[0], spreading.groups * spreading.outputs, *sizes, dtype=self.ending.dtype)

    def work(self, *inputs: Tensor) -> Work | None:
        return self.spreading.work(inputs[0].shape)


class SpreadOnednn(Spread, Conv):
    """Transposed convolution on onednn's ordinary convolution kernels."""

    name: ClassVar[str] = "onednn qconv, spread"


class SpreadFbgemm(Spread, ConvFbgemm):
    """Transposed convolution on fbgemm's ordinary convolution kernels."""

    name: ClassVar[str] = "fbgemm qconv, spread"


@kernel("x86", "conv_transpose")
def onednn(call: Call) -> Kernel:
    check_bytes(call, "onednn")
    return _as_spread(SpreadOnednn(call, Ending.of(call)), "onednn")


@kernel("x86", "conv_transpose")
def fbgemm(call: Call) -> Kernel:
    check_bytes(call, "fbgemm")
    made = _as_spread(SpreadFbgemm(call, fbgemm_ending(call)), "fbgemm, for transposed convolutions,")
    made.check_reach(ROUNDED_BITS)
    return made


def _as_spread(kernel: Spread, engine: str) -> Spread:
    """A kernel whose zeros between the taps are those of symmetric weights.

    Taps are added in pairs if the inputs of a group are odd in number, and other taps are neighbours here.
    """
    if kernel.spreading.inputs % 2:
        kernel.check_pairs()
    return symmetric(kernel, engine)
