"""Difference of two results of a program, and its tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from typing import Any

import torch

from quantc.ir.types import type_of_value
from quantc.pipeline.base_pass import Preserves

ROUNDING: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}
"""Allowed rounding error, relative to the largest value in the tensor. Other dtypes: none."""
BYTES = (torch.uint8, torch.int8)
STEP = 1.0
"""Allowed difference of 8-bit results, where a pass promises that ops stay within one step."""
ROUNDED = 0.02
"""Allowed error of a float that is computed of levels which may be one step off, relative to the largest value."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed difference: `relative` to the largest value (None: by dtype, see ROUNDING) plus `absolute`."""

    relative: float | None = None
    absolute: float = 1e-7

    def allowed(self, value: torch.Tensor, preserves: Preserves, rounds: bool = False) -> float:
        """`rounds` says that the value is made of floats that were rounded to 8 bits, each perhaps to the next level."""
        if preserves is Preserves.STEPWISE and value.dtype in BYTES:
            return STEP
        if preserves is Preserves.EXACTLY or value.dtype not in ROUNDING:
            return 0.0
        share = ROUNDING[value.dtype] if self.relative is None else self.relative
        share = max(share, ROUNDED) if rounds else share
        finite = value.detach().abs().to(torch.float64)
        finite = finite[finite.isfinite()]
        largest = float(finite.max()) if finite.numel() else 0.0
        return self.absolute + share * largest


@dataclass(frozen=True, slots=True)
class Gap:
    """A difference beyond the tolerance; infinite if the values are not comparable."""

    size: float
    allowed: float
    what: str

    def __str__(self) -> str:
        return self.what


def gap(before: Any, after: Any, preserves: Preserves, tolerance: Tolerance, rounds: bool = False) -> Gap | None:
    """The difference between two values, or None if within the tolerance. Containers are compared item by item."""
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return _tensor_gap(before, after, preserves, tolerance, rounds)
    left, right = _parts(before), _parts(after)
    if left is not None and right is not None and left.keys() == right.keys():
        found = (gap(part, right[name], preserves, tolerance, rounds) for name, part in left.items())
        return next((item for item in found if item is not None), None)
    if type(before) is type(after) and (before is after or _are_equal(before, after)):
        return None
    return Gap(inf, 0.0, f"was {_short(before)}, is {_short(after)}")


def _parts(value: Any) -> dict[Any, Any] | None:
    """The items of a sequence or mapping, or the fields of a dataclass, whose own `==` does not work with tensors in
    it."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return None


def _are_equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except Exception:  # noqa: BLE001 - what an object's comparison raises says that the two cannot be told to be the same
        return False


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one shape. Equal infinities and NaNs count as equal."""
    if left.is_floating_point() and left.itemsize == 1:  # torch compares no float8
        left, right = left.float(), right.float()
    if torch.equal(left, right):
        return 0.0
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    wide_left, wide_right = left.detach().to(torch.float64), right.detach().to(torch.float64)
    same = (left == right) | (wide_left.isnan() & wide_right.isnan())
    apart = (wide_left - wide_right).abs().nan_to_num(nan=inf, posinf=inf)[~same]
    if not apart.numel():
        return 0.0
    # integers beyond 2**53 can differ and yet be equal as float64
    return float(apart.max()) or 1.0


def _tensor_gap(
    before: torch.Tensor, after: torch.Tensor, preserves: Preserves, tolerance: Tolerance, rounds: bool
) -> Gap | None:
    if before.shape != after.shape or before.dtype != after.dtype:
        return Gap(inf, 0.0, f"was {type_of_value(before)}, is {type_of_value(after)}")
    size = distance(before, after)
    allowed = tolerance.allowed(before, preserves, rounds) if size else 0.0
    if size <= allowed:
        return None
    return Gap(size, allowed, f"differs by {size:.6g} (allowed: {allowed:.3g})")


def _short(value: Any) -> str:
    kind = type_of_value(value)
    return str(kind) if kind is not None else repr(value)[:60]
