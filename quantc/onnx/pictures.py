"""Pools and scaling of images."""

from __future__ import annotations

from typing import Any

import torch

from quantc.onnx.products import pair, unbatched
from quantc.onnx.table import Call, Value, writes


def _window(call: Call, count: int) -> dict[str, Any]:
    kernel = pair(call["kernel_size"], count)
    padding = pair(call["padding"], count)
    return {
        "kernel_shape": kernel,
        "strides": pair(call["stride"] or kernel, count),
        "pads": padding + padding,
        "ceil_mode": int(call["ceil_mode"]),
    }


def _axes(call: Call) -> int:
    """Over how many axes an op goes, by the digit in its name."""
    return int(next(letter for letter in str(call.node.target) if letter.isdigit()))


def _batched(call: Call) -> tuple[str, bool]:
    x, count = call.read(call.node.args[0]), _axes(call)
    is_single = call.type(call.node.args[0]).rank == count + 1
    return (call.emit("Unsqueeze", x, call.writer.numbers([0])), True) if is_single else (x, False)


@writes("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices")
def max_pool(call: Call) -> Value:
    count = _axes(call)
    x, was_single = _batched(call)
    made = call.emit("MaxPool", x, dilations=pair(call["dilation"], count), **_window(call, count))
    made = unbatched(call, made, was_single)
    return (made, "") if "indices" in str(call.node.target) else made


@writes("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(call: Call) -> Value:
    count = _axes(call)
    if count > 1 and call["divisor_override"] is not None:
        raise call.refuse(f"{call.node.name} divides by a number of its own")
    x, was_single = _batched(call)
    made = call.emit("AveragePool", x, count_include_pad=int(call["count_include_pad"]), **_window(call, count))
    return unbatched(call, made, was_single)


def _adaptive(call: Call, whole: str, part: str) -> Value:
    """Into one cell, or into cells of one size."""
    source: Any = call.node.args[0]
    count = _axes(call)
    wanted = call.node.args[1]
    cells = [wanted] * count if isinstance(wanted, int) else list(wanted)  # type: ignore[arg-type]
    x, was_single = _batched(call)
    if all(cell == 1 for cell in cells):
        return unbatched(call, call.emit(whole, x), was_single)
    sizes = call.type(source).shape[-count:]
    kernel = [_cell(size, cell) for size, cell in zip(sizes, cells, strict=True)]
    if None in kernel:
        raise call.refuse(f"{call.node.name} makes {cells} of {list(sizes)}, which are cells of several sizes")
    return unbatched(call, call.emit(part, x, kernel_shape=kernel, strides=kernel), was_single)


def _cell(size: int | str, count: int | None) -> int | None:
    """How large each of so many cells is; None if they are not all as large."""
    if count is None:
        return 1
    return size // count if isinstance(size, int) and size % count == 0 else None


@writes("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(call: Call) -> Value:
    return _adaptive(call, "GlobalAveragePool", "AveragePool")


@writes(*(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)))
def adaptive_max_pool(call: Call) -> Value:
    made = _adaptive(call, "GlobalMaxPool", "MaxPool")
    return str(made), ""


@writes(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
)
def upsample(call: Call) -> Value:
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
