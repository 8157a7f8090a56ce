"""Functions and methods by which users mean an op: all the spellings of an op are one in a program."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import fx, nn
from torch.nn import functional

from quantc.capture.symbolic.python_spellings import OPERATORS, RENAMED
from quantc.ir.dialect import BY_NAME, op_name

SPELLINGS: dict[str, tuple[str, ...]] = {
    "relu6": ("clamp",),
    "hardtanh": ("clamp",),
    "view": ("reshape",),
    "bmm": ("matmul",),
    "mm": ("matmul",),
    "adaptive_avg_pool1d": ("adaptive_avg_pool1d",),
    "interpolate": (
        *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
        *("upsample_linear1d", "upsample_bilinear2d", "aten.upsample_trilinear3d.vec"),
    ),
    "narrow": ("slice", "narrow"),
    "squeeze": ("squeeze", "aten.squeeze.default", "aten.squeeze.dims"),
    "repeat_interleave": ("aten.repeat_interleave.self_int",),
    "permute": ("permute", "transpose"),
    "transpose": ("permute", "transpose"),
}
"""The ops of the dialect that a Python name stands for, where that is not an op of the same name."""


@cache
def ops_of(given: Callable[..., Any] | str) -> tuple[str, ...]:
    """The ops that a function or the name of a method stands for; none if it stands for no op of the dialect."""
    name = given if isinstance(given, str) else OPERATORS.get(given, getattr(given, "__name__", ""))
    if not isinstance(given, str) and not _is_torch(given):
        return ()
    name = RENAMED.get(name.removesuffix("_"), name.removesuffix("_"))  # in place or not, it is one op
    if name in SPELLINGS:
        return SPELLINGS[name]
    return (name,) if name in BY_NAME else ()


def _is_torch(function: Callable[..., Any]) -> bool:
    """True for functions of torch and operators of Python."""
    if function in OPERATORS:
        return True
    name = getattr(function, "__name__", "")
    homes: tuple[Any, ...] = (torch, functional, getattr(torch._C, "_nn", None), torch.Tensor)
    return any(getattr(home, name, None) is function for home in homes)


def is_module_class(given: object) -> TypeGuard[type[nn.Module]]:
    return isinstance(given, type) and issubclass(given, nn.Module)


def class_name(kind: type[nn.Module]) -> str:
    """The qualified name of a class, as node origins write it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def stands_for(given: Callable[..., Any] | str, node: fx.Node) -> bool:
    """True if a function or method name is a spelling of the node's op."""
    return op_name(node) in ops_of(given)
