"""Types of nodes: dtype and shape, read from `val`, in a comparable and printable form.

`node.meta["val"]` is the one entry of `meta` that quantc reads. It may hold a (fake) tensor, a symbolic number, a tuple
of those, or, in programs parsed from text, one of the types below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "b1",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorType:
    """`f32[2,3,s0]`: a dimension is a number, or an expression over symbols such as `s0` or `2*s0`."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return all(isinstance(size, int) for size in self.shape)

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}[{','.join(str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A Python number: `int(s0)`, `float(1.5)`, `bool(Eq(s0, 2))`."""

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind}({self.value})"


@dataclass(frozen=True, slots=True)
class TupleType:
    """Several outputs: `(f32[2,4], i64[2,4])`; an unknown item prints as `?`."""

    items: tuple[ValueType | None, ...]

    def __str__(self) -> str:
        return f"({', '.join('?' if item is None else str(item) for item in self.items)})"


ValueType = TensorType | ScalarType | TupleType


def type_of_value(value: Any) -> ValueType | None:
    """The type of a tensor, number, or sequence of them; None for anything else."""
    if isinstance(value, TensorType | ScalarType | TupleType):
        return value
    if isinstance(value, torch.Tensor):
        shape = tuple(size if type(size) is int else str(size) for size in value.shape)
        return TensorType(value.dtype, shape)
    if isinstance(value, bool | torch.SymBool):
        return ScalarType("bool", str(value))
    if isinstance(value, int | torch.SymInt):
        return ScalarType("int", str(value))
    if isinstance(value, float | torch.SymFloat):
        return ScalarType("float", str(value))
    if isinstance(value, tuple | list):
        return TupleType(tuple(type_of_value(item) for item in value))
    return None


def type_of(node: fx.Node) -> ValueType | None:
    """The type of a node's value, or None if the program was captured without shapes."""
    value = node.meta.get("val")
    return None if value is None else type_of_value(value)


def tensor_type(node: Any) -> TensorType | None:
    """The type of `node` if it is a node known to yield one tensor."""
    if not isinstance(node, fx.Node):
        return None
    kind = type_of(node)
    return kind if isinstance(kind, TensorType) else None


def is_empty(node: Any) -> bool:
    """True if `node` is known to yield a tensor without elements."""
    kind = tensor_type(node)
    return kind is not None and 0 in kind.shape


def rank_of(node: Any) -> int | None:
    kind = tensor_type(node)
    return None if kind is None else kind.rank


def dtype_of(node: Any) -> torch.dtype | None:
    kind = tensor_type(node)
    return None if kind is None else kind.dtype


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """Split at separators that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    tail = text[start:]
    if tail.strip() or parts:
        parts.append(tail)
    return [part.strip() for part in parts]


def _dimension(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def parse_type(text: str) -> ValueType | None:
    """The inverse of `str(type)`; `?` is the unknown type. Raises ValueError on anything else."""
    text = text.strip()
    if text == "?":
        return None
    if text.startswith("(") and text.endswith(")"):
        return TupleType(tuple(parse_type(part) for part in split_top_level(text[1:-1])))
    if scalar := re.fullmatch(r"(int|float|bool)\((.*)\)", text):
        return ScalarType(scalar[1], scalar[2])
    tensor = re.fullmatch(r"(\w+)\[(.*)\]", text)
    if tensor is None or tensor[1] not in DTYPES:
        raise ValueError(f"{text!r} is not a type; a type looks like f32[2,3], i64[], int(s0) or (f32[2], i64[2])")
    return TensorType(DTYPES[tensor[1]], tuple(_dimension(part) for part in split_top_level(tensor[2])))


def same_types(left: Sequence[fx.Node], right: Sequence[fx.Node]) -> bool:
    """True if two lists of nodes yield the same types, one by one."""
    return len(left) == len(right) and all(type_of(a) == type_of(b) for a, b in zip(left, right, strict=True))
