"""The ops of the Q/DQ form, `torch.ops.quantized_decomposed`: registered by torch, or by quantc if torch does not.

Importing torch does not register them; importing one of its modules does, and that module may one day be gone. Defining
an op twice is an error, so quantc defines them only if they are missing.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from quantc.text.target_names import ON_DEMAND

REGISTRARS = ("torch.ao.quantization.fx._decomposed", "torchao.quantization.pt2e")
"""Modules that register the ops when imported, tried in this order."""

_library: torch.library.Library | None = None


@cache
def decomposed_ops() -> Any:
    """The namespace `torch.ops.quantized_decomposed`, with its ops registered."""
    for module in REGISTRARS:
        if _are_registered():
            break
        try:
            import_module(module)
        except ImportError:
            continue
    if not _are_registered():
        _register()
    return torch.ops.quantized_decomposed


ON_DEMAND["quantized_decomposed"] = decomposed_ops


def _are_registered() -> bool:
    return hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor")


def _quantize_per_tensor(x: Tensor, scale: float, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    return (torch.round(x.float() * (1.0 / scale)) + zero_point).clamp(qmin, qmax).to(dtype)


def _dequantize_per_tensor(
    q: Tensor,
    scale: float,
    zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return (q.to(out_dtype if out_dtype is not None else torch.float32) - zero_point) * scale


def _quantize_tensor_overload(x: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any) -> Tensor:
    return _quantize_per_tensor(x, scale.item(), int(zero_point.item()), *rest)


def _dequantize_tensor_overload(
    q: Tensor, scale: Tensor, zero_point: Tensor, *rest: Any, out_dtype: torch.dtype | None = None
) -> Tensor:
    return _dequantize_per_tensor(q, scale.item(), int(zero_point.item()), *rest, out_dtype=out_dtype)


def _along(values: Tensor, rank: int, axis: int) -> Tensor:
    return values.reshape([-1 if dim == axis % rank else 1 for dim in range(rank)])


def _quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    scales, zero_points = _along(scales, x.dim(), axis), _along(zero_points, x.dim(), axis)
    return (torch.round(x.float() * (1.0 / scales)) + zero_points).clamp(qmin, qmax).to(dtype)


def _dequantize_per_channel(
    q: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    axis: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    shifted = q if zero_points is None else q - _along(zero_points, q.dim(), axis)
    return (shifted * _along(scales, q.dim(), axis)).to(out_dtype if out_dtype is not None else torch.float32)


def _quantize_per_token(
    x: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    return torch.round(x * (1.0 / scales) + zero_points).clamp(qmin, qmax).to(dtype)


def _dequantize_per_token(
    q: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype, output_dtype: torch.dtype
) -> Tensor:
    return ((q - zero_points) * scales).to(output_dtype)


def _quantize_per_group(
    x: Tensor, scales: Tensor, zero_points: Tensor, qmin: int, qmax: int, dtype: torch.dtype, group_size: int
) -> Tensor:
    levels = torch.round(x.reshape(-1, group_size) * (1.0 / scales.reshape(-1, 1)) + zero_points.reshape(-1, 1))
    return levels.clamp(qmin, qmax).to(dtype).reshape(x.shape)


def _dequantize_per_group(
    q: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    group_size: int,
    output_dtype: torch.dtype,
) -> Tensor:
    groups = q.reshape(-1, group_size)
    shifted = groups if zero_points is None else groups - zero_points.reshape(-1, 1)
    return (shifted * scales.reshape(-1, 1)).reshape(q.shape).to(output_dtype)


BOUNDS = "int quant_min, int quant_max, ScalarType dtype"
OPS = {
    f"quantize_per_tensor(Tensor input, float scale, int zero_point, {BOUNDS}) -> Tensor": _quantize_per_tensor,
    f"quantize_per_tensor.tensor(Tensor input, Tensor scale, Tensor zero_point, {BOUNDS}) -> Tensor": (
        _quantize_tensor_overload
    ),
    f"dequantize_per_tensor(Tensor input, float scale, int zero_point, {BOUNDS}, *, "
    "ScalarType? out_dtype=None) -> Tensor": _dequantize_per_tensor,
    f"dequantize_per_tensor.tensor(Tensor input, Tensor scale, Tensor zero_point, {BOUNDS}, *, "
    "ScalarType? out_dtype=None) -> Tensor": _dequantize_tensor_overload,
    f"quantize_per_channel(Tensor input, Tensor scales, Tensor zero_points, int axis, {BOUNDS}) -> Tensor": (
        _quantize_per_channel
    ),
    f"dequantize_per_channel(Tensor input, Tensor scales, Tensor? zero_points, int axis, {BOUNDS}, *, "
    "ScalarType? out_dtype=None) -> Tensor": _dequantize_per_channel,
    f"quantize_per_token(Tensor input, Tensor scales, Tensor zero_points, {BOUNDS}) -> Tensor": _quantize_per_token,
    f"dequantize_per_token(Tensor input, Tensor scales, Tensor zero_points, {BOUNDS}, "
    "ScalarType output_dtype) -> Tensor": _dequantize_per_token,
    f"quantize_per_channel_group(Tensor input, Tensor scales, Tensor zero_points, {BOUNDS}, int group_size) "
    "-> Tensor": _quantize_per_group,
    f"dequantize_per_channel_group(Tensor input, Tensor scales, Tensor? zero_points, {BOUNDS}, int group_size, "
    "ScalarType output_dtype) -> Tensor": _dequantize_per_group,
}
"""Schema and implementation of each op, for a torch without them."""


def _register() -> None:
    global _library  # noqa: PLW0603 - the ops live as long as the library object does
    _library = torch.library.Library("quantized_decomposed", "DEF")  # type: ignore[no-untyped-call]
    for schema, implementation in OPS.items():
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(schema.partition("(")[0], implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
