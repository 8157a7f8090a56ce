"""Checks for NaN and infinity in tensors, and for valid scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from quantc.errors import DataError

EMPTY_ROW = "a row of minus infinity alone"
"""Forbidden in a mask: softmax of such a row is NaN."""


def why_not_finite(x: Tensor, *, may_be_infinite: bool = False, masks_rows: bool = False) -> str | None:
    """The kind of non-finite value in a tensor: "NaN" or "infinity". None for integers, and for tensors without
    storage.

    With `may_be_infinite` the tensor is a mask and may hold minus infinity; with `masks_rows` its last axis goes into a
    softmax, so that no row may hold minus infinity alone.
    """
    if not (x.is_floating_point() or x.is_complex()) or x.is_meta or isinstance(x, FakeTensor) or _is_traced():
        return None
    x = x.detach()
    while is_functorch_wrapped_tensor(x):  # the values are hidden inside torch.vmap
        x, masks_rows = get_unwrapped(x), False
    if x.dtype.itemsize == 1:
        x = x.float()  # torch has no sum for fp8
    # a non-finite element makes the sum non-finite; a sum takes a tenth of the time of an elementwise test
    total = x.sum()
    if math.isfinite(abs(total.item())):
        return None
    if may_be_infinite and masks_rows and not x.is_complex():
        return _why_no_mask(x.amax(-1))
    if bool(x.isnan().any()):
        return "NaN"
    return "infinity" if not may_be_infinite and bool(x.isinf().any()) else None


def _why_no_mask(highest: Tensor) -> str | None:
    """The same for a mask, given the maximum of each row."""
    if bool(highest.isfinite().all()):
        return None
    if bool(highest.isnan().any()):
        return "NaN"
    return "infinity" if bool(highest.isposinf().any()) else EMPTY_ROW


def _is_traced() -> bool:
    """True while calls are recorded to be replayed on other data, so that the values at hand mean nothing."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return mode is not None or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def count_not_finite(x: Tensor) -> int:
    """The number of elements that are NaN or infinite."""
    return int((~torch.isfinite(x.detach())).sum())


def check_scales(scale: Tensor, name: str, where: str | None = None) -> None:
    """Raise DataError, naming `name`, unless every scale is a positive finite number."""
    found = scale.detach()
    bad = found.numel() - int((torch.isfinite(found) & (found > 0)).sum())
    if bad:
        first = next(value for value in found.flatten().tolist() if not (math.isfinite(value) and value > 0))
        raise DataError(
            f"the scale of {name} is {first}{f', and {bad - 1} more are no scales' if bad > 1 else ''}",
            where=where,
            advice="a scale is a positive finite number: look for NaN and infinity in what it was found from",
        )
