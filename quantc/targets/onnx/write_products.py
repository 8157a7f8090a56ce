"""ONNX writers of convolutions, linear layers, matmuls, attention and embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from quantc.qdq.ops import is_dequantize
from quantc.targets.block_windows import BlockWindow
from quantc.targets.onnx.dtypes import INT32
from quantc.targets.onnx.image_channels import wide_conv
from quantc.targets.onnx.op_writers import OpCall, Value, writes
from quantc.targets.onnx.quantized_initializers import QuantizedInitializer

LARGEST = 2**31 - 1


def bias_of(call: OpCall, bias: Any, weight: QuantizedInitializer | None) -> str:
    """A bias; int32 on the accumulator's scale if input and weight are quantized: integer kernels need it so, and a
    float bias keeps ONNX Runtime from using them. Any other bias is unchanged.
    """
    step, tensor = _step(call["x"], weight), call.translation.program.tensor(bias)
    wanted = call.translation.profile.bias
    is_taken = wanted == "int32" or (wanted == "convolutions" and "conv" in str(call.node.target))
    if step is None or tensor is None or tensor.dim() != 1 or not is_taken:
        return call.read(bias)
    levels = (tensor.detach().double() / step.double()).round()
    if not bool((levels.abs() <= LARGEST).all()):
        return call.read(bias)
    axis = 0 if step.dim() else None
    return QuantizedInitializer(f"{bias.target}_quantized", levels.to(torch.int32), step, None, axis, kind=INT32).write(
        call.writer
    )


def _step(node: Any, weight: QuantizedInitializer | None) -> Tensor | None:
    """The scale of sums of products: that of the input times those of the weight. None if either has none."""
    scale = _scale_of(node)
    if weight is None or weight.scale is None or weight.group is not None or weight.kind is None or scale is None:
        return None
    return torch.tensor(scale) * weight.scale.float()


def _scale_of(node: Any) -> float | None:
    """The scale of a tensor that was quantized with a fixed one."""
    if not isinstance(node, fx.Node) or not is_dequantize(node) or "per_tensor" not in str(node.target):
        return None
    scale = node.args[1]
    return scale if isinstance(scale, float) else None


# -- convolutions --------------------------------------------------------------------------------------------------


def pair(given: Any, count: int) -> list[int]:
    """A setting for each axis; a single number applies to all."""
    return [int(given)] * count if isinstance(given, int) else [int(each) for each in given]


def _window(call: OpCall, count: int) -> dict[str, list[int]]:
    padding = pair(call["padding"], count)
    return {
        "strides": pair(call["stride"], count),
        "dilations": pair(call["dilation"], count),
        "pads": padding + padding,
    }


def _with_batch(call: OpCall, x: str, count: int) -> tuple[str, bool]:
    """Input of a convolution, with a batch axis."""
    if call.rank() == count + 2:
        return x, False
    return call.emit("Unsqueeze", x, call.writer.numbers([0])), True


def remove_batch_axis(call: OpCall, y: str, was_single: bool) -> str:
    """Result without the batch axis that a single image was given."""
    return call.emit("Squeeze", y, call.writer.numbers([0])) if was_single else y


@writes("conv1d", "conv2d", "conv3d")
def conv(call: OpCall) -> Value:
    weight = call.translation.stored(call["w"])
    sizes = [int(size) for size in call.type(call["w"]).shape[2:]]
    bias = () if call["b"] is None else (bias_of(call, call["b"], weight),)
    if weight is not None and _step(call["x"], weight) is not None:
        stride, padding, dilation = (pair(call[name], len(sizes)) for name in ("stride", "padding", "dilation"))
        wide = wide_conv(call, weight, BlockWindow(stride, padding, dilation, int(call["groups"])), *bias)
        if wide is not None:
            return wide
    x, was_single = _with_batch(call, call.tensor("x"), len(sizes))
    w = call.for_float(call["w"]) if _scale_of(call["x"]) is None else call.tensor("w")
    inputs = (x, w, *bias)
    made = call.emit("Conv", *inputs, kernel_shape=sizes, group=int(call["groups"]), **_window(call, len(sizes)))
    return remove_batch_axis(call, made, was_single)


@writes("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(call: OpCall) -> Value:
    sizes = [int(size) for size in call.type(call["w"]).shape[2:]]
    x, was_single = _with_batch(call, call.tensor("x"), len(sizes))
    bias = () if call["b"] is None else (call.tensor("b"),)
    made = call.emit(
        "ConvTranspose",
        x,
        call.for_float(call["w"]),
        *bias,
        kernel_shape=sizes,
        group=int(call["groups"]),
        output_padding=pair(call["output_padding"], len(sizes)),
        **_window(call, len(sizes)),
    )
    return remove_batch_axis(call, made, was_single)


# -- matrices ------------------------------------------------------------------------------------------------------


def transposed_weight(call: OpCall, node: Any) -> str:
    """Linear weight with output channels last; constants are stored transposed."""
    weight = call.translation.stored(node)
    if weight is not None:
        return weight.transposed().write(call.writer)
    tensor = call.translation.program.tensor(node)
    if tensor is not None:
        return call.writer.constant(tensor.detach().t(), f"{node.target}_transposed")
    return call.emit("Transpose", call.read(node), perm=[1, 0])


@writes("linear")
def linear(call: OpCall) -> Value:
    if call.type(call["w"]).rank == 1:
        product = call.emit("MatMul", call.tensor("x"), call.tensor("w"))
        return product if call["b"] is None else call.emit("Add", product, call.tensor("b"))
    weight = call.translation.stored(call["w"])
    stored = None if weight is None else weight.transposed()
    return _affine(call, stored, lambda: transposed_weight(call, call["w"]), call["b"])


def _affine(call: OpCall, weight: QuantizedInitializer | None, write: Callable[[], str], bias: Any) -> str:
    """x w + b. `weight` is behind what `write` writes, if that is stored quantized; it is written once, in the form needed."""
    levels = call.translation.levels_of(call["x"]) if call.translation.profile.dynamic == "integer" else None
    if weight is not None and weight.is_bytes and levels is not None:
        product = _of_integers(call, levels, weight)
        return product if bias is None else call.emit("Add", product, call.read(bias))
    x, w = call.tensor("x"), write()
    if bias is None:
        return call.emit("MatMul", x, w)
    b = bias_of(call, bias, weight)
    if call.type(bias).rank == 1:
        if call.rank() == 2:
            return call.emit("Gemm", x, w, b)
        if (shapes := _as_matrix(call)) is not None:
            rows, back = shapes
            product = call.emit("Gemm", call.emit("Reshape", x, call.writer.numbers(rows)), w, b)
            return call.emit("Reshape", product, call.writer.numbers(back))
    return call.emit("Add", call.emit("MatMul", x, w), b)


def _as_matrix(call: OpCall) -> tuple[list[int], list[int]] | None:
    """Shapes to flatten a batch of dynamic size into one matrix and back. With static sizes ONNX Runtime does so
    itself, to add the bias to integer sums.
    """
    given, made = call.type(call["x"]).shape, call.result.shape
    if sum(isinstance(size, str) for size in given[:-1]) != 1 or not isinstance(given[-1], int):
        return None
    return [-1, given[-1]], [size if isinstance(size, int) else -1 for size in made]


def _of_integers(call: OpCall, levels: tuple[str, str, str], weight: QuantizedInitializer) -> str:
    """A matmul with the output of DynamicQuantizeLinear, in the form that ONNX Runtime fuses into its kernel."""
    x, scale, zero_point = levels
    steps, offsets = weight.constants(call.writer)
    w = call.writer.constant(weight.levels, weight.name, weight.kind)
    sums = call.emit("MatMulInteger", x, w, zero_point, *([offsets] if offsets else []))
    return call.emit("Mul", call.writer.cast(sums, torch.float32), call.emit("Mul", scale, steps))


@writes("matmul")
def matmul(call: OpCall) -> Value:
    weight = call.translation.stored(call["y"])
    if weight is None or weight.levels.dim() != 2:
        return call.emit("MatMul", call.tensor("x"), call.tensor("y"))
    return _affine(call, weight, lambda: call.tensor("y"), None)


@writes("aten.bmm.default", "aten.mm.default", "aten.mv.default", "aten.dot.default")
def plain_matmul(call: OpCall) -> Value:
    left, right = call.node.args[:2]
    return call.emit("MatMul", call.read(left), call.read(right))


@writes("addmm", "baddbmm")
def addmm(call: OpCall) -> Value:
    weight = call.translation.stored(call["y"])
    if (call["alpha"], call["beta"]) == (1, 1) and weight is not None and weight.levels.dim() == 2:
        return _affine(call, weight, lambda: call.tensor("y"), call["b"])
    dtype, product = call.result.dtype, call.emit("MatMul", call.tensor("x"), call.tensor("y"))
    if call["alpha"] != 1:
        product = call.emit("Mul", product, call.writer.scalar(call["alpha"], dtype))
    bias = call.tensor("b")
    if call["beta"] != 1:
        bias = call.emit("Mul", bias, call.writer.scalar(call["beta"], dtype))
    return call.emit("Add", product, bias)


@writes("einsum")
def einsum(call: OpCall) -> Value:
    equation = str(call["equation"]).replace(" ", "")
    return call.emit("Einsum", *(call.read(each) for each in call["operands"]), equation=equation)


@writes("bilinear")
def bilinear(call: OpCall) -> Value:
    made = call.emit("Einsum", call.tensor("x"), call.tensor("w"), call.tensor("y"), equation="...i,oij,...j->...o")
    return made if call["b"] is None else call.emit("Add", made, call.tensor("b"))


@writes("sdpa")
def attention(call: OpCall) -> Value:
    """softmax(q kᵀ · scale + mask) v."""
    if float(call["dropout_p"]):
        raise call.refuse(f"{call.node.name} drops values")
    rank, dtype = call.rank("q"), call.result.dtype
    q, k, v = call.tensor("q"), _heads(call, "k"), _heads(call, "v")
    depth = call.type(call["q"]).shape[-1]
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(int(depth))
    order = [*range(rank - 2), rank - 1, rank - 2]
    scores = call.emit("MatMul", q, call.emit("Transpose", k, perm=order))
    scores = call.emit("Mul", scores, call.writer.scalar(float(scale), dtype))
    mask = call["mask"]
    if mask is not None:
        scores = _apply_mask(call, scores, mask)
    if call["is_causal"]:
        scores = _causal(call, scores, rank)
    made = call.emit("MatMul", call.emit("Softmax", scores, axis=-1), v)
    return made if mask is None else _without_masked_rows(call, made, mask)


def _without_masked_rows(call: OpCall, made: str, mask: fx.Node) -> str:
    """Zeros where a mask excludes all keys of a query, as in torch; a softmax of nothing but -inf is NaN. Computed from the mask alone,
    which is smaller than the scores and often constant."""
    dtype, last = call.type(mask).dtype, call.writer.numbers([-1])
    known = call.translation.program.tensor(mask)
    if known is not None and not bool(_is_masked(known).all(-1).any()):
        return made
    if dtype is torch.bool:
        seen = call.emit("ReduceMax", call.writer.cast(call.read(mask), torch.int32), last, keepdims=1)
        is_masked = call.emit("Equal", seen, call.writer.scalar(0, torch.int32))
    else:
        highest = call.emit("ReduceMax", call.read(mask), last, keepdims=1)
        is_masked = call.emit("Equal", highest, call.writer.scalar(-math.inf, dtype))
    return call.emit("Where", is_masked, call.writer.scalar(0.0, call.result.dtype), made)


def _is_masked(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype is torch.bool else mask == -math.inf


def _heads(call: OpCall, name: str) -> str:
    """Keys or values, each head as often as queries share it."""
    if not call["enable_gqa"] or call.rank(name) < 3:
        return call.tensor(name)
    heads, own = call.type(call["q"]).shape[-3], call.type(call[name]).shape[-3]
    if heads == own:
        return call.tensor(name)
    if not isinstance(heads, int) or not isinstance(own, int):
        raise call.refuse(f"how many heads {call.node.name} has varies")
    places = call.writer.numbers([head for head in range(own) for _ in range(heads // own)])
    return call.emit("Gather", call.tensor(name), places, axis=call.rank(name) - 3)


def _apply_mask(call: OpCall, scores: str, mask: fx.Node) -> str:
    if call.type(mask).dtype is not torch.bool:
        return call.emit("Add", scores, call.read(mask, call.result.dtype))
    lowest = call.writer.scalar(-math.inf, call.result.dtype)
    return call.emit("Where", call.read(mask), scores, lowest)


def _causal(call: OpCall, scores: str, rank: int) -> str:
    rows = call.emit("Shape", scores, start=rank - 2, end=rank)
    seen = call.emit("Trilu", call.emit("Expand", call.writer.scalar(1.0, torch.float32), rows), upper=0)
    lowest = call.writer.scalar(-math.inf, call.result.dtype)
    return call.emit("Where", call.writer.cast(seen, torch.bool), scores, lowest)


@writes("embedding")
def embedding(call: OpCall) -> Value:
    """Rows are gathered in their stored format, and only those are dequantized."""
    weight = call.translation.stored(call["w"])
    indices = call.tensor("indices")
    if weight is None or weight.kind is None or weight.group is not None or weight.axis not in (0, None):
        return call.emit("Gather", call.tensor("w"), indices, axis=0)
    scale, zero_point = weight.constants(call.writer)
    levels = call.emit("Gather", call.writer.constant(weight.levels, weight.name), indices, axis=0)
    wide = call.writer.cast(levels, torch.float32)
    if weight.zero_point is not None and bool(weight.zero_point.any()):
        offset = _row(call, call.writer.cast(zero_point, torch.float32), indices, weight)
        wide = call.emit("Sub", wide, offset)
    return call.emit("Mul", wide, _row(call, scale, indices, weight))


def _row(call: OpCall, values: str, indices: str, weight: QuantizedInitializer) -> str:
    """Per-row values of the rows that were looked up."""
    if weight.axis is None:
        return values
    return call.emit("Unsqueeze", call.emit("Gather", values, indices, axis=0), call.writer.numbers([-1]))
