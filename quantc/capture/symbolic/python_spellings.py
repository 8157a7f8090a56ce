"""Overload resolution: from Python functions to ATen overloads, by schema.

`torch.relu`, `Tensor.relu` and `torch._C._nn.gelu` all share their name with the ATen op they call; what is left is to
choose the overload whose schema accepts the arguments. This works on *kinds* of values alone, so it needs neither
shapes nor example inputs.
"""

from __future__ import annotations

import inspect
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from quantc.ir.dialect import Argument, arguments, aten, overload_names


class ArgumentKind(Enum):
    """Static knowledge about a traced value, without its shape."""

    TENSOR = "tensor"
    NUMBER = "number"
    SHAPE = "shape"
    """A size: a sequence of numbers of unknown length."""
    SEQUENCE = "sequence"
    """Several tensors, number unknown."""
    DTYPE = "dtype"
    ANYTHING = "anything"


OPERATORS: dict[Callable[..., Any], str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.pow: "pow",
    operator.matmul: "matmul",
    operator.neg: "neg",
    operator.pos: "positive",
    operator.invert: "bitwise_not",
    operator.and_: "__and__",
    operator.or_: "__or__",
    operator.xor: "__xor__",
    operator.lshift: "__lshift__",
    operator.rshift: "__rshift__",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
    operator.abs: "abs",
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
    operator.ifloordiv: "floor_divide_",
    operator.imod: "remainder_",
    operator.ipow: "pow_",
    operator.iand: "__iand__",
    operator.ior: "__ior__",
    operator.ixor: "__ixor__",
}
DUNDERS: dict[str, Callable[..., Any]] = {
    **{f"__{function.__name__.strip('_')}__": function for function in OPERATORS},
    "__radd__": lambda x, y: operator.add(y, x),
    "__rsub__": lambda x, y: operator.sub(y, x),
    "__rmul__": lambda x, y: operator.mul(y, x),
    "__rtruediv__": lambda x, y: operator.truediv(y, x),
    "__rpow__": lambda x, y: operator.pow(y, x),
    "__rmatmul__": lambda x, y: operator.matmul(y, x),
}

SPREAD = frozenset(
    {"view", "reshape", "permute", "expand", "repeat", "tile", "flip", "new_zeros", "new_ones", "new_empty"}
)
"""Methods that take their list of numbers spread out: `x.view(2, 3)`."""

RENAMED: dict[str, str] = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "clip_": "clamp_",
}
"""Aliases in Python of ops that ATen keeps under another name."""

CASTS: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}

FACTORIES = frozenset(
    {
        *("zeros", "ones", "empty", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm"),
        *("tril_indices", "triu_indices", "logspace", "scalar_tensor"),
    }
)
"""Functions that make tensors from numbers alone."""
SIZED_FACTORIES = frozenset({"zeros", "ones", "empty", "rand", "randn"})
"""Factories whose size may be spread out: `torch.zeros(2, 3)`."""

PYTHON_METHODS = frozenset({"norm", "split", "unique", "unique_consecutive"})
"""Methods of Tensor whose Python body picks the ATen op."""

PREFERRED = {"vec": 0, "default": 1, "Tensor": 2, "Tensor_Tensor": 3}
SCALAR_IS_TENSOR = frozenset(
    {"add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "floor_divide", "floor_divide_"}
)
"""Ops whose Python signature takes a number where ATen's says Tensor."""

KEYWORD_ALIASES = {"input": "self", "axis": "dim", "keepdims": "keepdim", "x": "self", "x1": "self", "x2": "other"}


def is_builtin(function: Any) -> bool:
    """True if a function is implemented in ATen rather than in Python."""
    return inspect.isbuiltin(function) or inspect.ismethoddescriptor(function)


def packet(name: str) -> OpOverloadPacket | None:
    """ATen op of a Python name; None if there is none."""
    found = getattr(aten, RENAMED.get(name, name), None)
    return found if isinstance(found, OpOverloadPacket) else None


class SpelledCall(Enum):
    """Destination of a call's result."""

    RETURNED = "in a new tensor, or the one it writes to by its nature"
    OUT = "in the tensor given as out="


@cache
def overloads(op: OpOverloadPacket, result: SpelledCall = SpelledCall.RETURNED) -> tuple[OpOverload, ...]:
    """Overloads a Python call may refer to: no named dimensions; those on tensors first."""
    usable = []
    for overload in (getattr(op, name) for name in overload_names(op)):
        rows = overload._schema.arguments
        has_out = any(row.is_out for row in rows)
        is_meant = not overload._schema.is_mutable or overload._schema.name.endswith(("_", "__")) or has_out
        if is_meant and has_out is (result is SpelledCall.OUT) and not any("Dimname" in str(row.type) for row in rows):
            usable.append(overload)
    # `vec` is what torch.nn.functional.interpolate calls; tensors come before numbers, as in Python's own choice
    return tuple(sorted(usable, key=lambda overload: PREFERRED.get(overload._overloadname, len(PREFERRED))))


class Binding:
    """Arguments in schema order of an overload."""

    def __init__(self, overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.overload = overload
        self.args = args
        self.kwargs = kwargs


def resolve(
    op: OpOverloadPacket,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kind_of: Callable[[Any], ArgumentKind | None],
) -> Binding | None:
    """The first overload that accepts the arguments, bound; None if none does."""
    has_out = isinstance(kwargs.get("out"), torch.Tensor) or kind_of(kwargs.get("out")) is not None
    for overload in overloads(op, SpelledCall.OUT if has_out else SpelledCall.RETURNED):
        binding = _bind(overload, args, kwargs, kind_of)
        if binding is not None:
            return binding
    return None


def _bind(
    overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kind_of: Callable[[Any], ArgumentKind | None]
) -> Binding | None:
    rows = arguments(overload)
    positional = [row for row in rows if not row.keyword_only]
    if len(args) > len(positional):
        return None
    given: dict[str, Any] = {row.aten_name: value for row, value in zip(positional, args, strict=False)}
    by_name = {row.aten_name: row for row in rows}
    for key, value in kwargs.items():
        name = key if key in by_name else KEYWORD_ALIASES.get(key, key)
        if name not in by_name and name == "self" and rows:
            name = rows[0].aten_name
        if name not in by_name:
            if key in ("requires_grad", "out", "generator") and (value is None or value is False):
                continue
            return None
        if name in given:
            return None
        given[name] = value
    loose = overload._schema.name.removeprefix("aten::") in SCALAR_IS_TENSOR
    for row in rows:
        if row.aten_name not in given:
            if not row.has_default:
                return None
        elif not _accepts(row, given[row.aten_name], kind_of, loose):
            return None
    return _make_binding(overload, rows, given)


def _make_binding(overload: OpOverload, rows: tuple[Argument, ...], given: dict[str, Any]) -> Binding:
    positional = [row for row in rows if not row.keyword_only]
    last = max((index for index, row in enumerate(positional) if row.aten_name in given), default=-1)
    ordered = tuple(_widen(row, given.get(row.aten_name, row.default)) for row in positional[: last + 1])
    keywords = {
        row.aten_name: _widen(row, given[row.aten_name]) for row in rows if row.keyword_only and row.aten_name in given
    }
    return Binding(overload, ordered, keywords)


def _widen(row: Argument, value: Any) -> Any:
    """A lone number where the schema wants a list of them."""
    if row.width is not None and isinstance(value, numbers.Number):
        return [value] * row.width
    if isinstance(value, torch.Size):
        return list(value)
    return value


def _is_number(value: Any, kind_of: Callable[[Any], ArgumentKind | None]) -> bool:
    return isinstance(value, numbers.Number | torch.SymInt | torch.SymFloat) or kind_of(value) is ArgumentKind.NUMBER


def _is_int(value: Any, kind_of: Callable[[Any], ArgumentKind | None]) -> bool:
    if isinstance(value, bool | float | complex):
        return isinstance(value, bool)
    return _is_number(value, kind_of)


def _is_tensor(value: Any, kind_of: Callable[[Any], ArgumentKind | None]) -> bool:
    return isinstance(value, torch.Tensor) or kind_of(value) in (ArgumentKind.TENSOR, ArgumentKind.ANYTHING)


Test = Callable[[Any, Callable[[Any], ArgumentKind | None]], bool]
ATOMS: dict[str, Test] = {
    "Tensor": _is_tensor,
    "number": _is_number,
    "int": _is_int,
    "SymInt": _is_int,
    "float": _is_number,
    "bool": lambda value, _: isinstance(value, bool),
    "str": lambda value, _: isinstance(value, str),
    "ScalarType": lambda value, kind_of: isinstance(value, torch.dtype) or kind_of(value) is ArgumentKind.DTYPE,
    "Layout": lambda value, _: isinstance(value, torch.layout),
    "MemoryFormat": lambda value, _: isinstance(value, torch.memory_format),
    "Device": lambda value, _: isinstance(value, torch.device | str),
    "Generator": lambda value, _: isinstance(value, torch.Generator),
    "Storage": lambda value, _: False,
    "Stream": lambda value, _: False,
}


@cache
def _real_type(overload_argument: str) -> tuple[str, bool, str]:
    """(atom, is optional, list form) of a type's text; list form is "", "list" or "list of optional"."""
    text = overload_argument
    is_optional = text.startswith("Optional[")
    if is_optional:
        text = text[len("Optional[") : -1]
    if text.startswith("List[Optional["):
        return text[len("List[Optional[") : -2], is_optional, "list of optional"
    if text.startswith("List["):
        return text[len("List[") : -1], is_optional, "list"
    return text, is_optional, ""


def _accepts(row: Argument, value: Any, kind_of: Callable[[Any], ArgumentKind | None], loose: bool) -> bool:
    atom, is_optional, form = _real_type(row.type)
    if value is None:
        return is_optional
    test = ATOMS.get(atom)
    if test is None:
        return False
    if not form:
        return test(value, kind_of) or (loose and atom == "Tensor" and _is_number(value, kind_of))
    if isinstance(value, list | tuple):
        return all((item is None and form == "list of optional") or test(item, kind_of) for item in value)
    if row.width is not None and test(value, kind_of):
        return True
    kind = kind_of(value)
    return (kind is ArgumentKind.SHAPE and atom in ("int", "SymInt")) or (
        kind is ArgumentKind.SEQUENCE and atom == "Tensor"
    )
