"""Classify the torch functions that are intercepted, by name, since one op has many spellings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverloadPacket
from torch.utils import _pytree as pytree

from quantc.ir.dialect import WEIGHTED, ops_in
from quantc.ir.op_row import Family


class Kind(Enum):
    """The ways to treat a torch function in a quantized model."""

    OTHER = "runs untouched"
    QUERY = "asks about a tensor without looking at its numbers"
    HOOKED = "may be quantized"
    COPY = "copies elements, bytes as well as floats"
    OPENED = "is written in Python, and is followed into"
    DROPOUT = "gives its argument back, but in training"
    MEMORY = "hands out memory, which can be written to without torch counting it"


PRODUCTS = frozenset(
    {
        *WEIGHTED,
        *("bilinear", "matmul", "mm", "addmm", "bmm", "__matmul__", "__rmatmul__"),
        *ops_in(Family.LOOKUP, Family.RECURRENT, Family.RECURRENT_CELL),
    }
)
"""Calls that are quantized on their own account, if they have a parameter of the model."""
COPIES = frozenset({"cat", "concat", "stack", "clone", "flip", "roll"})
"""Calls that move elements, and whose results never share memory with their arguments."""
DROPOUT = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
MODES: dict[str, tuple[int, tuple[str, ...], bool, tuple[tuple[Any, ...], ...]]] = {
    **dict.fromkeys((*DROPOUT, *(f"{name}_" for name in DROPOUT)), (2, ("training", "train"), True, ())),
    "batch_norm": (5, ("training",), False, ((0, 6), (1, "momentum"))),
    "rrelu": (3, ("training",), False, ()),
    **dict.fromkeys(ops_in(Family.RECURRENT), (6, ("train",), False, ())),
}
"""Functions that compute differently in training: position, keywords and default of their mode argument, and paths of the
arguments that torch's own modules choose by the mode as well."""
OPENED: tuple[Callable[..., Any], ...] = (torch.nn.functional.multi_head_attention_forward,)
QUERIES = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "element_size", "get_device", "__len__", "is_signed"
    }
)  # fmt: skip
ATTRIBUTES = frozenset(
    {
        "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_sparse", "is_quantized",
        "is_leaf", "is_meta", "is_mkldnn", "grad", "grad_fn", "names", "itemsize", "nbytes", "is_nested", "is_mps",
        "is_xpu", "is_cpu", "_version"
    }
)  # fmt: skip
SHAPES = frozenset({"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "__len__", "layout"})
"""Queries that a placeholder answers as its tensor would."""
MEMORY = frozenset(
    {
        "numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "data_ptr",
        "const_data_ptr", "share_memory_", "data", "set_", "resize_", "resize_as_", "apply_", "map_", "map2_",
        "apply", "__array_interface__", "_base"
    }
)  # fmt: skip
"""Calls after which a tensor can be written to without torch counting it: `_version` stays as it is."""


def name_of(func: Any) -> str:
    """The name of a torch function; for the getter or setter of an attribute, the attribute's name."""
    name: str = getattr(func, "__name__", "").partition(".")[0]
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else name


def is_query(func: Any) -> bool:
    """True for a query of a tensor's metadata, which reads no elements."""
    name = getattr(func, "__name__", "")
    return name_of(func) in ATTRIBUTES if name == "__get__" else name in QUERIES


def hands_out_memory(func: Any) -> bool:
    """True if the result of a function exposes memory, so that writes to it bypass torch."""
    return name_of(func) in MEMORY


def kind_of(func: Any, hooked: frozenset[str]) -> Kind:
    """The kind of a function, given the names of the quantizable ones."""
    if is_query(func):
        return Kind.QUERY
    if func in OPENED:
        return Kind.OPENED
    if hands_out_memory(func):
        return Kind.MEMORY
    name = getattr(func, "__name__", "").partition(".")[0]
    if name in hooked or name in PRODUCTS:
        return Kind.HOOKED
    if name in DROPOUT:
        return Kind.DROPOUT
    return Kind.COPY if name in COPIES else Kind.OTHER


def writes_first(func: Any) -> bool:
    """True for in-place functions, by name: `add_`, `__iadd__`."""
    name = name_of(func)
    is_special = name.startswith("__") and name.endswith("__")
    return (
        name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
        if is_special
        else name.endswith("_")
    )


def says_it_writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """True if a call declares that it writes: by `out=`, or by its schema."""
    if kwargs.get("out") is not None:
        return True
    schema = getattr(func, "_schema", None)
    if schema is None and isinstance(func, OpOverloadPacket):
        return any(getattr(func, name)._schema.is_mutable for name in func.overloads())  # type: ignore[no-untyped-call]
    return schema is not None and bool(schema.is_mutable)


def is_product(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """True for a call of `PRODUCTS` with a parameter."""
    if getattr(func, "__name__", "") not in PRODUCTS:
        return False
    return any(isinstance(leaf, nn.Parameter) for leaf in pytree.tree_leaves((tuple(args), kwargs)))


def gives_back(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for dropout in inference, which returns its argument itself."""
    return (args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))) is False


@dataclass(frozen=True, slots=True)
class ModeArgument:
    """The argument that tells a call whether the model trains."""

    name: str
    path: tuple[Any, ...]
    value: bool
    follow: tuple[tuple[Any, ...], ...]
    """Other arguments that torch's own modules give by the mode."""


def mode_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModeArgument | None:
    """The mode argument of a call; None if it computes the same in both modes."""
    if (row := MODES.get(name_of(func))) is None:
        return None
    index, names, default, follow = row
    if len(args) > index:
        return ModeArgument(names[0], (0, index), bool(args[index]), follow)
    name = next((name for name in names if name in kwargs), names[0])
    return ModeArgument(name, (1, name), bool(kwargs.get(name, default)), follow)


@cache
def open_function(func: FunctionType) -> FunctionType:
    """A function of torch without its first lines, which would hand it over whole."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    made = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made
