"""ONNX writers of pooling and resizing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from quantc.ir.types import TensorType, TupleType, type_of
from quantc.targets.onnx.op_writers import OpCall, Value, writes
from quantc.targets.onnx.write_products import pair, remove_batch_axis


@dataclass(frozen=True)
class PoolWindows:
    """Windows of a pool along one axis."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    size: int | None
    """Size of the input; None if it varies."""
    count: int | None
    """Number of windows in torch; None if it varies."""

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    @property
    def end(self) -> int:
        """Padding that the last window needs at the end; the op's own padding if sizes are dynamic."""
        if self.size is None or self.count is None:
            return self.padding
        return max((self.count - 1) * self.stride + self.reach - self.size - self.padding, 0)

    @property
    def follows_onnx(self) -> bool:
        """True if no window can start in the padding at the end, for any size: torch drops these, ONNX does not."""
        return self.stride <= self.reach - self.padding

    def counted(self, includes_padding: bool) -> list[int]:
        """Divisor of each window in torch: with or without padding, but never elements beyond it."""
        size, count = self.size or 0, self.count or 0
        first, last = (-self.padding, size + self.padding) if includes_padding else (0, size)
        starts = [index * self.stride - self.padding for index in range(count)]
        return [min(start + self.kernel, last) - max(start, first) for start in starts]


def _windows(call: OpCall, count: int) -> list[PoolWindows]:
    kernel, padding = pair(call["kernel_size"], count), pair(call["padding"], count)
    stride = pair(call["stride"] or kernel, count)
    is_max = "max_pool" in str(call.node.target)
    dilation = pair(call["dilation"], count) if is_max else [1] * count
    sizes = call.type(call.node.args[0]).shape[-count:]
    kind = type_of(call.node)
    result = kind.items[0] if isinstance(kind, TupleType) else kind
    made = result.shape[-count:] if isinstance(result, TensorType) else (None,) * count
    known = [[size if isinstance(size, int) else None for size in each] for each in (sizes, made)]
    return [PoolWindows(*settings) for settings in zip(kernel, stride, padding, dilation, *known, strict=True)]


def _attributes(call: OpCall, windows: list[PoolWindows]) -> dict[str, Any]:
    """ONNX attributes of the windows. With ceil_mode, elements beyond the end are written as padding: torch and ONNX
    disagree on windows that start in the padding.
    """
    is_up = bool(call["ceil_mode"])
    is_fixed = all(each.count is not None and each.size is not None for each in windows)
    if is_up and not is_fixed and not all(each.follows_onnx for each in windows):
        raise call.refuse(f"{call.node.name} rounds the number of its windows up, and its sizes vary")
    begin = [each.padding for each in windows]
    return {
        "kernel_shape": [each.kernel for each in windows],
        "strides": [each.stride for each in windows],
        "pads": [*begin, *([each.end for each in windows] if is_up and is_fixed else begin)],
        "ceil_mode": int(is_up and not is_fixed),
    }


def _axes(call: OpCall) -> int:
    """Over how many axes an op goes, by the digit in its name."""
    return int(next(letter for letter in str(call.node.target) if letter.isdigit()))


def _with_batch(call: OpCall) -> tuple[str, bool]:
    x, count = call.read(call.node.args[0]), _axes(call)
    is_single = call.type(call.node.args[0]).rank == count + 1
    return (call.emit("Unsqueeze", x, call.writer.numbers([0])), True) if is_single else (x, False)


@writes("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices")
def max_pool(call: OpCall) -> Value:
    windows = _windows(call, _axes(call))
    x, was_single = _with_batch(call)
    settings = _attributes(call, windows)
    if any(pad >= size for pad, size in zip(settings["pads"], settings["kernel_shape"] * 2, strict=True)):
        # ONNX Runtime wants padding smaller than the kernel, however far that is spread
        x, settings["pads"] = _pad(call, x, settings["pads"], -math.inf), [0] * len(settings["pads"])
    made = call.emit("MaxPool", x, dilations=[each.dilation for each in windows], **settings)
    made = remove_batch_axis(call, made, was_single)
    return (made, "") if "indices" in str(call.node.target) else made


@writes("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(call: OpCall) -> Value:
    count = _axes(call)
    windows, includes_padding = _windows(call, count), bool(call["count_include_pad"])
    divisor = call["divisor_override"] if count > 1 else None
    x, was_single = _with_batch(call)
    settings = _attributes(call, windows)
    is_beyond = settings["ceil_mode"] or any(each.end > each.padding for each in windows)
    if divisor is None and not (call["ceil_mode"] and is_beyond):
        made = call.emit("AveragePool", x, count_include_pad=int(includes_padding), **settings)
        return remove_batch_axis(call, made, was_single)
    if settings["ceil_mode"]:
        raise call.refuse(f"{call.node.name} rounds the number of its windows up, and its sizes vary")
    if any(settings["pads"]):
        x, settings["pads"] = _pad(call, x, settings["pads"], 0.0), [0] * len(settings["pads"])
    made = call.emit("AveragePool", x, **settings)
    elements = prod(each.kernel for each in windows)
    if divisor is not None:
        return remove_batch_axis(call, call.emit("Mul", made, _number(call, elements / divisor)), was_single)
    shares = torch.ones([1, 1, *[1] * count])
    for axis, each in enumerate(windows):
        own = each.kernel / torch.tensor(each.counted(includes_padding), dtype=torch.float64)
        shares = shares * own.reshape([-1 if place == axis else 1 for place in range(count)])
    return remove_batch_axis(
        call, call.emit("Mul", made, call.writer.constant(shares.to(call.result.dtype))), was_single
    )


def _number(call: OpCall, value: float) -> str:
    return call.writer.scalar(value, call.result.dtype)


def _pad(call: OpCall, x: str, pads: list[int], value: float) -> str:
    """Images with more around them."""
    half = len(pads) // 2
    amounts = [0, 0, *pads[:half], 0, 0, *pads[half:]]
    return call.emit("Pad", x, call.writer.numbers(amounts), _number(call, value))


def _adaptive(call: OpCall, whole: str, part: str) -> Value:
    """Into one cell, or into cells of one size."""
    source: Any = call.node.args[0]
    count = _axes(call)
    wanted = call.node.args[1]
    cells = [wanted] * count if isinstance(wanted, int) else list(wanted)  # type: ignore[arg-type]
    x, was_single = _with_batch(call)
    if all(cell == 1 for cell in cells):
        return remove_batch_axis(call, call.emit(whole, x), was_single)
    sizes = call.type(source).shape[-count:]
    kernel = [_cell(size, cell) for size, cell in zip(sizes, cells, strict=True)]
    if None in kernel:
        raise call.refuse(f"{call.node.name} makes {cells} of {list(sizes)}, which are cells of several sizes")
    return remove_batch_axis(call, call.emit(part, x, kernel_shape=kernel, strides=kernel), was_single)


def _cell(size: int | str, count: int | None) -> int | None:
    """Size of each of `count` equal cells; None if they are not equal."""
    if count is None:
        return 1
    return size // count if isinstance(size, int) and size % count == 0 else None


@writes("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(call: OpCall) -> Value:
    return _adaptive(call, "GlobalAveragePool", "AveragePool")


@writes(*(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)))
def adaptive_max_pool(call: OpCall) -> Value:
    made = _adaptive(call, "GlobalMaxPool", "MaxPool")
    return str(made), ""


@writes(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
)
def upsample(call: OpCall) -> Value:
    is_nearest = "nearest" in str(call.node.target)
    aligned = not is_nearest and call["align_corners"]
    how = {
        "mode": "nearest" if is_nearest else "linear",
        "nearest_mode": "floor" if is_nearest else None,
        "coordinate_transformation_mode": "asymmetric" if is_nearest else "align_corners" if aligned else "half_pixel",
    }
    x = call.tensor("x")
    if call["scale_factors"] is not None:
        factors = torch.tensor([1.0, 1.0, *map(float, call["scale_factors"])])
        return call.emit("Resize", x, "", call.writer.constant(factors, "factors"), **how)
    first = call.emit("Shape", x, start=0, end=2)
    sizes = call.emit("Concat", first, call.sizes(list(call["output_size"])), axis=0)
    return call.emit("Resize", x, "", "", sizes, **how)
