"""Convolution windows: stride, padding, dilation and groups, output sizes, and the memory format kernels expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from quantc.errors import InputError
from quantc.ir.types import tensor_type
from quantc.targets.kernels.kernel import Work
from quantc.targets.kernels.kernel_table import Call, NoKernelError

FORMATS: dict[int, torch.memory_format] = {2: torch.channels_last, 3: torch.channels_last_3d}
"""The order in memory that kernels want, by the number of axes they go over."""
ADDED = 2
"""Position of the axis that makes a 1-d convolution 2-d: kernels support more of those."""


@dataclass(frozen=True)
class Window:
    """Stride, padding and dilation by spatial axis, and the number of groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @staticmethod
    def of(call: Call, axes: int) -> Window:
        """Window of an integer conv; lists of one number are broadcast to all spatial axes."""
        given = [call[name] for name in ("stride", "padding", "dilation")]
        if any(not isinstance(size, int) for sizes in given for size in sizes):
            raise NoKernelError("its window is not known before it runs")
        stride, padding, dilation = (list(sizes) * (axes if len(sizes) == 1 else 1) for sizes in given)
        return Window(stride, padding, dilation, call["groups"])

    @property
    def axes(self) -> int:
        return len(self.stride)

    @cached_property
    def wide(self) -> Window:
        """The window over at least two axes: a conv1d gets a leading axis of size 1."""
        if self.axes > 1:
            return self
        return Window([1, *self.stride], [0, *self.padding], [1, *self.dilation], self.groups)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.groups

    # -- shapes ----------------------------------------------------------------------------------------------------

    def sizes(self, sizes: Sequence[int], taps: Sequence[int]) -> list[int]:
        """Output sizes on the spatial axes."""
        each = zip(sizes, taps, self.stride, self.padding, self.dilation, strict=True)
        return [max(0, (n + 2 * pad - gap * (k - 1) - 1) // step + 1) for n, k, step, pad, gap in each]

    def empty(self, x: Tensor, weight: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Result for an empty batch; incompatible shapes raise torch's own error."""
        read, by = torch.empty(x.shape, device="meta"), torch.empty(list(weight), device="meta")
        sizes = (self.stride, self.padding, self.dilation, False, [0] * self.axes, self.groups)
        return x.new_zeros(torch.convolution(read, by, None, *sizes).shape, dtype=dtype)

    def check_onednn(self, x: Any, taps: Sequence[int], inputs: int) -> None:
        """Refuse windows that onednn's AVX-512 kernels compute wrongly or write out of bounds for: results that cover
        nothing but padding, and, with one input channel per group, results one element wide and windows over three
        axes.

        `x` is the input node; `inputs` counts input channels per group. Where a result's receptive field depends on
        sizes that are not known statically, it is refused as well. On all processors, since kernels are selected by
        speed alone.
        """
        sizes = _sizes(x, self.axes)
        each = list(zip(sizes, taps, self.padding, self.dilation, strict=True))
        if any(pad > gap * (k - 1) for _, k, pad, gap in each):
            raise NoKernelError("some of its results are of padding alone, which onednn does not compute rightly")
        if any(k > 1 and gap > 1 and not _is_least(size, gap) for size, k, _, gap in each):
            raise NoKernelError("some of its results may be of padding alone, which onednn does not compute rightly")
        if inputs == 1 and self.axes == 3:
            raise NoKernelError("onednn does not compute groups of one channel over three axes rightly")
        size, k, pad, gap = each[-1]
        if inputs == 1 and self.stride[-1] > 1 and not _is_least(size, self.stride[-1] + gap * (k - 1) + 1 - 2 * pad):
            raise NoKernelError("its results may be one place wide, which onednn does not compute rightly here")

    def check(self, x: Tensor, kernel: str) -> None:
        """Refuse a tensor that is neither a batch nor a single item."""
        if x.dim() not in (self.axes + 1, self.axes + 2):
            raise InputError(
                f"{kernel} was given a tensor of shape {tuple(x.shape)}, and goes over {self.axes} axes",
                where="what it reads",
                advice="call the lowered module with inputs of the shapes it was captured for",
            )

    # -- memory ----------------------------------------------------------------------------------------------------

    def images(self, x: Tensor) -> Tensor:
        """A batch over two or three spatial axes, in the memory format kernels expect."""
        if self.axes == 1:
            x = x.unsqueeze(ADDED)
        return x.contiguous(memory_format=FORMATS[max(self.axes, 2)])

    def like_input(self, made: Tensor) -> Tensor:
        """The result with as many spatial axes as the input had."""
        return made.squeeze(ADDED) if self.axes == 1 else made

    # -- what its time depends on ----------------------------------------------------------------------------------

    def work(self, shape: Sequence[int], weight: Sequence[int]) -> Work:
        """Workload of an input, for a weight `[outputs, inputs per group, *taps]`."""
        batch = shape[0] if len(shape) == self.axes + 2 else 1
        inputs, outputs, taps = weight[1] * self.groups, weight[0], weight[2:]
        pixels = batch * math.prod(self.sizes(shape[-self.axes :], taps))
        rest = [f"padding {self.padding}"] if any(self.padding) else []
        rest += [f"dilation {self.dilation}"] if set(self.dilation) != {1} else []
        rest += [f"{self.groups} groups"] if self.groups > 1 else []
        return Work(
            kind_of("conv", taps, self.stride, self.groups, weight[1]), pixels, (inputs, outputs), ", ".join(rest)
        )


def shape_to_pack_for(window: Window, weight: Sequence[int], x: Tensor) -> list[int] | None:
    """Input shape for which onednn packs a weight `[outputs, inputs per group, …]`; None to pack for any shape."""
    batch = list(x.shape) if x.dim() == window.axes + 2 else [1, *x.shape]
    if 0 in batch or len(batch) != window.axes + 2:
        return None
    if weight[1] == 1 < window.groups < weight[0]:
        return None  # torch unpacks such a weight beyond the end of memory if it was packed for a shape
    return batch if window.axes > 1 else [*batch[:ADDED], 1, *batch[ADDED:]]


def _sizes(x: Any, axes: int) -> list[int | None]:
    """Sizes of the input on the spatial axes; None for unknown ones."""
    kind = tensor_type(x) if isinstance(x, fx.Node) else None
    shape = [None] * axes if kind is None else kind.shape[-axes:]
    return [size if isinstance(size, int) else None for size in shape]


def _is_least(size: int | None, least: int) -> bool:
    """True if a size is known and at least `least`."""
    return size is not None and size >= least


def kind_of(op: str, taps: Sequence[int], stride: Sequence[int], groups: int, inputs: int) -> str:
    """Key of a convolution in the cost tables, as `conv2d depthwise 3x3 s1`; `inputs` counts input channels per group."""
    grouped = [] if groups == 1 else ["depthwise" if inputs == 1 else "grouped"]
    step = stride[:1] if len(set(stride)) == 1 else stride
    return " ".join([f"{op}{len(taps)}d", *grouped, "x".join(map(str, taps)), "s" + "x".join(map(str, step))])
