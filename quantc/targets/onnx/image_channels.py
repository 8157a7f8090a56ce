"""Widening of convolutions over three-channel images: ONNX Runtime's fast kernels need a multiple of four channels.

Such an image is written with space-to-depth (`quantc.targets.block_windows`), or with a fourth channel that is
multiplied by zero. Both compute the same sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantc.integer.proof.bounds import by_channel, decisive, pair_reach
from quantc.ir.types import tensor_type
from quantc.targets.block_windows import IMAGE, SQUARE, BlockWindow, blocks_of
from quantc.targets.onnx.op_writers import OpCall
from quantc.targets.onnx.quantized_initializers import QuantizedInitializer
from quantc.targets.onnx.write_qdq import OnnxGrid, write_dequantize

CHANNELS = 4
"""Channels that the kernels multiply at a time."""
LARGEST, PAIR_BITS = 255, 16
"""The largest level of uint8, and the bits in which processors without VNNI add two products."""


def wide_conv(call: OpCall, weight: QuantizedInitializer, window: BlockWindow, *bias: str) -> str | None:
    """Convolution of quantized images with few channels, written with more. None if it has enough, or cannot be widened."""
    if call.translation.profile.images == "as they are" or (image := tensor_type(call["x"])) is None:
        return None
    has_offsets = weight.zero_point is not None and bool(weight.zero_point.any())
    if image.rank != IMAGE or has_offsets or OnnxGrid.of(_dequantize(call)).dtype is not torch.uint8:
        return None
    blocks = blocks_of(weight.levels, image, window, SQUARE)
    if blocks is not None and (not can_saturate(blocks.weight) or can_saturate(weight.levels)):
        levels = call.emit("SpaceToDepth", _levels(call), blocksize=SQUARE[0])
        pads = [*blocks.begin, *blocks.end]
        return _conv(call, levels, replace(weight, levels=blocks.weight), bias, pads=pads)
    if weight.levels.shape[1] != CHANNELS - 1 or window.groups != 1:
        return None
    levels = call.emit("Pad", _levels(call), call.writer.numbers([0, 0, 0, 0, 0, 1, 0, 0]))
    filled = replace(weight, levels=functional.pad(weight.levels, (0, 0, 0, 0, 0, 1)))
    pads = [*window.padding, *window.padding]
    settings = {"strides": list(window.stride), "dilations": list(window.dilation)}
    return _conv(call, levels, filled, bias, pads=pads, **settings)


def can_saturate(levels: Tensor) -> bool:
    """True if the sum of two adjacent products can exceed 16 bits for some image. Space-to-depth makes other products
    adjacent than those that `convert` has checked; a channel of zeros does not.
    """
    reach = pair_reach(decisive(by_channel(levels), "adjacent"), 0, LARGEST)
    return bool(reach.beyond(PAIR_BITS).any())


def _conv(call: OpCall, levels: str, weight: QuantizedInitializer, bias: tuple[str, ...], **settings: list[int]) -> str:
    x, w = write_dequantize(_dequantize(call), levels), weight.write(call.writer)
    return call.emit("Conv", x, w, *bias, kernel_shape=list(weight.levels.shape[2:]), **settings)


def _levels(call: OpCall) -> str:
    source: Any = call["x"].args[0]
    return call.read(source)


def _dequantize(call: OpCall) -> OpCall:
    """The op that brings the image back to float."""
    return OpCall(call.translation, call["x"])
