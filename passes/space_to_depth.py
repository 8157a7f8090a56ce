"""Space-to-depth for strided convolutions of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, fx

from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq.ops import is_dequantize
from quantc.qdq.registration import decomposed_ops
from quantc.targets.block_windows import ORDER, TALL, BlockWindow, block_shapes, blocks_of
from quantc.targets.executorch.view_ops import Mover, reshape_sizes

aten = torch.ops.aten


class SpaceToDepth(Pass):
    """Write strided convolutions of images with few channels over blocks of two rows, which are channels.

    XNNPACK multiplies eight channels at a time, and an image has three. The sums are the same, in two thirds of the
    products; padding that is not the same on both sides is an op before it. Only convolutions of quantized images by
    constant quantized weights without zero points are written so, and only where the number of rows is known and even.
    Other partitioners than XNNPACK's get the image: `qc.lower(..., partitioners=...)` leaves this pass out.
    """

    name: ClassVar[str] = "space-to-depth"
    needs: ClassVar[Stage] = Stage.QUANTIZED
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        found = [node for node in program.nodes() if is_conv_of_levels(node)]
        written = sum(_over_blocks(program, node) for node in found)
        return Outcome(written > 0, (f"{written} convolutions written over blocks",) if written else ())


def is_conv_of_levels(node: fx.Node) -> bool:
    """A convolution of images, of which input and weight are quantized beforehand."""
    if not is_op(node, "conv2d"):
        return False
    x, weight = argument(node, "x"), argument(node, "w")
    return is_dequantize(weight) and is_dequantize(x) and x.target is decomposed_ops().dequantize_per_tensor.default


def _over_blocks(program: Program, node: fx.Node) -> bool:
    """The levels of an image as those of its blocks, and a convolution of them; the padding, which is not the same on
    both sides any more, is an op before it. Whether it was written so."""
    x, weight, bias = (argument(node, name) for name in ("x", "w", "b"))
    image, levels = tensor_type(x), _plain_levels(program, weight)
    settings = (argument(node, name) for name in ("stride", "padding", "dilation", "groups"))
    blocks = None if levels is None else blocks_of(levels, image, BlockWindow(*settings), TALL)
    if blocks is None or image is None:
        return False
    apart, whole = block_shapes(image, TALL)
    mover = Mover(program, node)
    made = mover.move(x, aten.reshape.default, (reshape_sizes(apart),), _of(apart))
    made = mover.move(made, aten.permute_copy.default, (list(ORDER),), _of([apart[axis] for axis in ORDER]))
    made = mover.move(made, aten.reshape.default, (reshape_sizes(whole),), _of(whole))
    sides = [end for axis in (1, 0) for end in (blocks.begin[axis], blocks.end[axis])]
    if any(sides):
        sizes = zip(whole[2:], blocks.begin, blocks.end, strict=True)
        padded = [*whole[:2], *(int(size) + begin + end for size, begin, end in sizes)]
        made = mover.emit(aten.constant_pad_nd.default, (made, sides, 0.0), _of(padded))
    own = program.constant(f"{weight.args[0].target}_blocks", blocks.weight, before=node)
    filters = mover.emit(weight.target, (own, *weight.args[1:]), _of(blocks.weight.shape))
    node.args, node.kwargs = (made, filters, bias, list(blocks.stride), [0, 0], [1, 1], 1), {}
    program.touch()
    return True


def _plain_levels(program: Program, weight: fx.Node) -> Tensor | None:
    """The levels of a constant weight without zero points."""
    source, offsets = weight.args[0], weight.args[2]
    if isinstance(offsets, fx.Node):
        found = program.tensor(offsets)
        has_offsets = found is None or bool(found.any())
    else:
        has_offsets = offsets not in (None, 0)
    return None if has_offsets or not isinstance(source, fx.Node) else program.tensor(source)


def _of(shape: Sequence[int | str]) -> TensorType:
    return TensorType(torch.float32, tuple(shape))
