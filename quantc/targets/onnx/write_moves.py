"""ONNX writers of value-preserving ops: concat, split, reshape, pad."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from quantc.ir.size_expressions import least
from quantc.ir.types import TensorType, TupleType, type_of
from quantc.targets.onnx.op_writers import OpCall, Value, writes

PADDING = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
FAR = 2**63 - 1
"""The end of an axis."""


@writes("contiguous", "clone", "detach", "aten.alias.default", "aten.lift_fresh_copy.default", "dropout")
def same(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    if "dropout" in str(call.node.target) and call["train"]:
        raise call.refuse(f"{call.node.name} drops values")
    return call.translation.value(source)


# -- joining, splitting --------------------------------------------------------------------------------------------


@writes("cat")
def cat(call: OpCall) -> Value:
    dtype = call.result.dtype
    parts = [call.read(each, dtype) for each in call["xs"] if call.type(each).shape != (0,)]
    if not parts:
        return call.writer.constant(torch.empty(0, dtype=dtype))
    return call.emit("Concat", *parts, axis=call.axis(call["dim"], call.result.rank))


@writes("stack")
def stack(call: OpCall) -> Value:
    axis, shape = call.axis(call["dim"], call.result.rank), call.result.shape
    dtype = call.result.dtype
    if axis < call.result.rank - 1 and sum(not isinstance(size, int) for size in shape) <= 1:
        # joined and cut again: ONNX Runtime 1.31 does not load int8 tensors that are joined along a new axis
        joined = call.emit("Concat", *(call.read(each, dtype) for each in call["xs"]), axis=axis)
        return call.emit("Reshape", joined, call.writer.numbers([_or_found(size) for size in shape]))
    parts = [call.emit("Unsqueeze", call.read(each, dtype), call.writer.numbers([axis])) for each in call["xs"]]
    return call.emit("Concat", *parts, axis=axis)


def _parts(call: OpCall) -> list[TensorType]:
    kind = type_of(call.node)
    if not isinstance(kind, TupleType):
        raise call.refuse(f"how many parts {call.node.name} has is unknown: capture with example inputs")
    return [item for item in kind.items if isinstance(item, TensorType)]


@writes("split", "split_sizes", "chunk")
def split(call: OpCall) -> Value:
    parts, axis = _parts(call), call.axis(call["dim"])
    sizes = [part.shape[axis] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        raise call.refuse(f"{call.node.name} has parts of sizes that vary")
    if len(parts) == 1:
        return (call.tensor("x"),)
    lengths = call.writer.numbers([int(size) for size in sizes])
    return call.many("Split", [call.tensor("x"), lengths], len(parts), axis=axis)


@writes("unbind")
def unbind(call: OpCall) -> Value:
    parts, axis = _parts(call), call.axis(call["dim"])
    x = call.tensor("x")
    return tuple(
        call.emit("Gather", x, call.writer.scalar(index, torch.int64), axis=axis) for index in range(len(parts))
    )


# -- shapes --------------------------------------------------------------------------------------------------------


@writes("reshape", "aten.view.default", "aten._unsafe_view.default")
def reshape(call: OpCall) -> Value:
    """A single dynamic size is left for ONNX to infer: a constant shape is easier to optimize."""
    source, given = call.node.args[:2]
    shape: list[Any] = list(given)  # type: ignore[arg-type]
    varying = [index for index, size in enumerate(shape) if isinstance(size, fx.Node)]
    if len(varying) == 1 and -1 not in shape and 0 not in shape:
        shape[varying[0]] = -1
    return call.emit("Reshape", call.read(source), call.sizes(shape), allowzero=_zeros(shape))


def _zeros(shape: Sequence[Any]) -> int | None:
    """`allowzero` of a Reshape: a size of zero, also a dynamic one, means zero; ONNX would copy the input's size."""
    can_be_zero = any(size == 0 or not isinstance(size, int) for size in shape)
    return 1 if can_be_zero and -1 not in shape else None


@writes("flatten", "unflatten")
def flatten(call: OpCall) -> Value:
    """Dynamic sizes are copied by position if they keep it, or inferred by ONNX if there is only one."""
    shape: list[Any] = list(call.result.shape)
    varying = [index for index, size in enumerate(shape) if not isinstance(size, int)]
    if len(varying) <= 1:
        sizes = [_or_found(size) for size in shape]
        return call.emit("Reshape", call.tensor("x"), call.writer.numbers(sizes), allowzero=_zeros(sizes))
    before = call.type(call["x"]).shape
    start = call.axis(call["start_dim"] if "flatten" in str(call.node.target) else call["dim"])
    if "unflatten" in str(call.node.target) or any(index > start for index in varying):
        return _flatten(call, start)
    kept = [0 if index < start and size == before[index] else _or_found(size) for index, size in enumerate(shape)]
    return call.emit("Reshape", call.tensor("x"), call.writer.numbers(kept))


def _or_found(size: Any) -> int:
    return size if isinstance(size, int) else -1


def _flatten(call: OpCall, start: int) -> str:
    """Flatten with the sizes of the input."""
    x, rank = call.tensor("x"), call.rank()
    if "unflatten" in str(call.node.target):
        inside, stop = call.sizes(list(call["sizes"])), start + 1
    else:
        inside, stop = call.writer.numbers([-1]), call.axis(call["end_dim"]) + 1
    before, after = call.emit("Shape", x, start=0, end=start), call.emit("Shape", x, start=stop, end=rank)
    return call.emit("Reshape", x, call.emit("Concat", before, inside, after, axis=0))


@writes("squeeze", "aten.squeeze.dims", "aten.squeeze.default")
def squeeze(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    kind = call.type(source)
    given: Any = call.node.args[1] if len(call.node.args) > 1 else range(kind.rank)
    listed = call.axes(given, kind.rank) if kind.rank else []
    for axis in listed:
        if _may_be_one(call, kind.shape[axis]):
            what = f"whether {call.node.name} takes axis {axis} away depends on a size that varies ({kind.shape[axis]})"
            raise call.refuse(f"{what}: name the axes to squeeze, or capture with a size that starts at 2")
    axes = [axis for axis in listed if kind.shape[axis] == 1]
    return call.emit("Squeeze", call.read(source), call.writer.numbers(axes)) if axes else call.read(source)


def _may_be_one(call: OpCall, size: int | str) -> bool:
    """True if a dynamic size can be 1, which torch's squeeze removes."""
    if isinstance(size, int):
        return False
    found = least(size, call.translation.program.signature.ranges)
    return found is None or found < 2


@writes("unsqueeze")
def unsqueeze(call: OpCall) -> Value:
    return call.emit("Unsqueeze", call.tensor("x"), call.writer.numbers([call.axis(call["dim"], call.result.rank)]))


@writes("transpose")
def transpose(call: OpCall) -> Value:
    order = list(range(call.rank()))
    if not order:
        return call.tensor("x")
    first, second = call.axis(call["dim0"]), call.axis(call["dim1"])
    order[first], order[second] = order[second], order[first]
    return call.emit("Transpose", call.tensor("x"), perm=order)


@writes("permute")
def permute(call: OpCall) -> Value:
    return call.emit("Transpose", call.tensor("x"), perm=call.axes(call["dims"]))


@writes("aten.t.default", "aten.numpy_T.default")
def reverse_axes(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    return call.emit("Transpose", call.read(source))


@writes("expand", "aten.expand_as.default")
def expand(call: OpCall) -> Value:
    """A size of -1 keeps the tensor's, as 1 does in ONNX."""
    source, size = call.node.args[:2]
    if isinstance(size, fx.Node):
        return call.emit("Expand", call.read(source), call.shape_of(size))
    kept = [1 if size == -1 else size for size in size]  # type: ignore[union-attr]
    return call.emit("Expand", call.read(source), call.sizes(kept))


@writes("repeat")
def repeat(call: OpCall) -> Value:
    counts, x = list(call["repeats"]), call.tensor("x")
    if more := len(counts) - call.rank():
        x = call.emit("Unsqueeze", x, call.writer.numbers(range(more)))
    return call.emit("Tile", x, call.sizes(counts))


@writes("aten.repeat_interleave.self_int")
def repeat_interleave(call: OpCall) -> Value:
    source, count = call.node.args[:2]
    kind, x = call.type(source), call.read(source)
    if not isinstance(count, int):
        raise call.refuse(f"{call.node.name} repeats as often as varies")
    axis = 0 if call["dim"] is None else call.axis(call["dim"], kind.rank)
    if call["dim"] is None:
        x = call.emit("Reshape", x, call.writer.numbers([-1]))
    sizes = kind.shape if call["dim"] is None else (*kind.shape, 1)[axis : axis + 1]
    if not all(isinstance(size, int) for size in sizes):
        raise call.refuse(f"{call.node.name} repeats along an axis whose size varies")
    places = [place for place in range(prod(int(size) for size in sizes)) for _ in range(count)]
    return call.emit("Gather", x, call.writer.numbers(places), axis=axis)


@writes("aten.broadcast_to.default")
def broadcast_to(call: OpCall) -> Value:
    return expand(call)


# -- turning, padding ----------------------------------------------------------------------------------------------


@writes("flip")
def flip(call: OpCall) -> Value:
    axes = call.axes(call["dims"])
    if not axes or not call.rank():
        return call.tensor("x")
    starts, ends, steps = ([number] * len(axes) for number in (-1, -FAR, -1))
    return call.emit("Slice", call.tensor("x"), *map(call.writer.numbers, (starts, ends, axes, steps)))


@writes("roll")
def roll(call: OpCall) -> Value:
    x, kind = call.tensor("x"), call.type(call["x"])
    if not call["dims"]:
        flat = call.emit("Reshape", x, call.writer.numbers([-1]))
        count = prod(int(size) for size in kind.shape) if kind.is_static else ""
        return call.emit("Reshape", _roll(call, flat, call["shifts"], [0], (count,)), call.shape_of(call["x"]))
    return _roll(call, x, call["shifts"], call.axes(call["dims"]), kind.shape)


def _roll(call: OpCall, x: str, shifts: Sequence[int], axes: Sequence[int], sizes: Sequence[int | str]) -> str:
    for shift, axis in zip(shifts, axes, strict=True):
        size = sizes[axis]
        if isinstance(size, int):
            places = call.writer.numbers([(place - int(shift)) % size for place in range(size)])
            x = call.emit("Gather", x, places, axis=axis)
            continue
        found = call.emit("Max", call.size(x, axis), call.writer.numbers([1]))
        cut = call.emit("Mod", call.writer.numbers([-int(shift)]), found)
        tail = call.emit("Slice", x, cut, call.writer.numbers([FAR]), call.writer.numbers([axis]))
        head = call.emit("Slice", x, call.writer.numbers([0]), cut, call.writer.numbers([axis]))
        x = call.emit("Concat", tail, head, axis=axis)
    return x


@writes("pad", "aten.constant_pad_nd.default")
def pad(call: OpCall) -> Value:
    amounts, mode = list(call["pad"]), "constant"
    if "constant_pad" not in str(call.node.target):
        mode = PADDING[str(call["mode"])]
    rank = call.result.rank
    before, after = [0] * rank, [0] * rank
    for index in range(len(amounts) // 2):
        before[rank - 1 - index], after[rank - 1 - index] = amounts[2 * index], amounts[2 * index + 1]
    value = (call.writer.scalar(call["value"] or 0, call.result.dtype),) if mode == "constant" else ()
    source: Any = call.node.args[0]
    return call.emit("Pad", call.read(source), call.sizes(before + after), *value, mode=mode)


IMAGE = 3
"""Channels, height and width."""


def _images(call: OpCall) -> str:
    """The input with one axis before channels, height and width."""
    x, kind = call.tensor("x"), call.type(call["x"])
    if kind.rank == IMAGE + 1:
        return x
    if not all(isinstance(size, int) for size in kind.shape[-IMAGE:]):
        raise call.refuse(f"the sizes of {call['x'].name} vary: {kind}")
    return call.emit("Reshape", x, call.writer.numbers([-1, *(int(size) for size in kind.shape[-IMAGE:])]))


def _as_before(call: OpCall, made: str) -> str:
    """Images, with the axes in front that those that were read have."""
    result = call.result
    if result.rank == IMAGE + 1:
        return made
    last = call.writer.numbers([int(size) for size in result.shape[-IMAGE:]])
    front = call.emit("Shape", call.tensor("x"), start=0, end=result.rank - IMAGE)
    return call.emit("Reshape", made, call.emit("Concat", front, last, axis=0))


@writes("pixel_shuffle")
def pixel_shuffle(call: OpCall) -> Value:
    factor = int(call["upscale_factor"])
    return _as_before(call, call.emit("DepthToSpace", _images(call), blocksize=factor, mode="CRD"))


def _regroup(call: OpCall, x: str, middle: list[Any], order: list[int], last: list[Any]) -> str:
    parts = call.emit("Reshape", x, call.writer.numbers(middle))
    return call.emit("Reshape", call.emit("Transpose", parts, perm=order), call.writer.numbers(last))


@writes("pixel_unshuffle")
def pixel_unshuffle(call: OpCall) -> Value:
    factor, sizes = int(call["downscale_factor"]), call.type(call["x"]).shape[-IMAGE:]
    if not all(isinstance(size, int) for size in sizes):
        raise call.refuse(f"the sizes of {call['x'].name} vary: {call.type(call['x'])}")
    channels, height, width = (int(size) for size in sizes)
    high, wide = height // factor, width // factor
    middle = [-1, channels, high, factor, wide, factor]
    last = [-1, channels * factor * factor, high, wide]
    return _as_before(call, _regroup(call, _images(call), middle, [0, 1, 3, 5, 2, 4], last))


@writes("channel_shuffle")
def channel_shuffle(call: OpCall) -> Value:
    groups = int(call["groups"])
    channels, *rest = call.fixed()
    order = [0, 2, 1, *range(3, 3 + len(rest))]
    return _regroup(call, call.tensor("x"), [-1, groups, channels // groups, *rest], order, [-1, channels, *rest])
