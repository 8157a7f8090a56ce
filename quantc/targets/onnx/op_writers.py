"""How each op is written in ONNX: a table from names of ops to functions, and what these are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import fx

from quantc.errors import RefusedError
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from quantc.ir.types import ScalarType, TensorType, dtype_of, tensor_type, type_of
from quantc.targets.onnx.graph_builder import Writer
from quantc.targets.onnx.profiles import Profile
from quantc.targets.onnx.quantized_initializers import Stored, stored

Value = str | tuple[str, ...]
"""The name of a result, or the names of several."""


class NoOnnxFormError(RefusedError):
    """Something that ONNX, or what quantc writes of it, has no form for."""


@dataclass(eq=False)
class Translation:
    """A program that is being written."""

    program: Program
    writer: Writer
    profile: Profile
    values: dict[fx.Node, Value] = field(default_factory=dict)
    bounds: dict[fx.Node, tuple[float | None, float | None]] = field(default_factory=dict)
    """Activations that are left to the quantize op after them, by what they clip to."""
    chosen: dict[fx.Node, str] = field(default_factory=dict)
    """What DynamicQuantizeLinear quantized, by the op that chose its scale."""

    def value(self, node: fx.Node) -> str:
        """The name of what a node yields. Constants are written when they are first asked for."""
        if node not in self.values:
            self.values[node] = self._constant(node)
        found = self.values[node]
        if isinstance(found, tuple):
            raise NoOnnxFormError(f"{node.name} yields several tensors, and is read as one")
        return found

    def _constant(self, node: fx.Node) -> str:
        tensor = self.program.tensor(node)
        if tensor is not None:
            return self.writer.constant(tensor, str(node.target))
        weight = stored(self.program, node)
        if weight is None:
            raise NoOnnxFormError(f"{node.name} is no tensor")
        before, self.writer.scope = self.writer.scope, node.name
        name = weight.write(self.writer)
        self.writer.scope = before
        return name

    def levels_of(self, node: Any) -> tuple[str, str, str] | None:
        """Levels, scale and zero point of a tensor that `node` brings back to float, if it has one scale that was found
        as the model runs."""
        if not isinstance(node, fx.Node) or op_name(node) != "quantized_decomposed.dequantize_per_tensor.tensor":
            return None
        levels, scale, zero_point = (self.value(given) for given in node.args[:3])  # type: ignore[arg-type]
        return (levels, scale, zero_point) if dtype_of(node.args[0]) in (torch.int8, torch.uint8) else None

    def stored(self, node: Any) -> Stored | None:
        """The constant behind a node that brings one back to float."""
        return stored(self.program, node)


@dataclass(frozen=True, eq=False)
class Call:
    """One op, with what it is given."""

    translation: Translation
    node: fx.Node

    @property
    def writer(self) -> Writer:
        return self.translation.writer

    def __getitem__(self, name: str) -> Any:
        """An argument, with its default."""
        return argument(self.node, name)

    def emit(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.writer.emit(op, *inputs, **attributes)

    def many(self, op: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> tuple[str, ...]:
        return self.writer.many(op, inputs, outputs, **attributes)

    # -- types ---------------------------------------------------------------------------------------------------------

    @property
    def result(self) -> TensorType:
        """The type of what it yields."""
        return self.type(self.node)

    def type(self, node: Any) -> TensorType:
        """The type of what a node yields, which has to be known."""
        found = tensor_type(node)
        if found is None:
            raise NoOnnxFormError(f"the shape of {getattr(node, 'name', node)} is unknown: capture with example inputs")
        return found

    def rank(self, name: str = "x") -> int:
        return self.type(self[name]).rank

    def axis(self, given: int, rank: int | None = None) -> int:
        """An axis counted from the front."""
        rank = self.rank() if rank is None else rank
        return int(given) % max(rank, 1)

    def axes(self, given: Any, rank: int | None = None) -> list[int]:
        """Axes counted from the front."""
        rank = self.rank() if rank is None else rank
        listed = [given] if isinstance(given, int) else list(given)
        return [self.axis(each, rank) for each in listed]

    def axes_or_all(self, given: Any, rank: int | None = None) -> list[int]:
        """The axes that a reduction goes over: an empty list, or None, is all of them."""
        rank = self.rank() if rank is None else rank
        return self.axes(range(rank) if given is None or given == [] else given, rank)

    def fixed(self, name: str = "x") -> tuple[int, ...]:
        """The sizes of an operand but for the first; these have to be fixed."""
        found = self.type(self[name])
        if not all(isinstance(size, int) for size in found.shape[1:]):
            raise NoOnnxFormError(f"the sizes of {self[name].name} vary: {found}")
        return tuple(int(size) for size in found.shape[1:])

    # -- values --------------------------------------------------------------------------------------------------------

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> str:
        """An operand by name, as a tensor of a type: its own unless that is given."""
        return self.read(self[name], dtype)

    def read(self, given: Any, dtype: torch.dtype | None = None) -> str:
        """What an argument is, as a tensor: a node's value or a number."""
        if not isinstance(given, fx.Node):
            return self.writer.scalar(given, dtype if dtype is not None else torch.float32)
        name = self.translation.value(given)
        kind = type_of(given)
        own = torch.int64 if isinstance(kind, ScalarType) else None if not isinstance(kind, TensorType) else kind.dtype
        return name if dtype is None or own == dtype else self.writer.cast(name, dtype)

    def for_float(self, node: Any) -> str:
        """A weight for an op that computes in float, in the form that its runtime wants."""
        weight = self.translation.stored(node)
        if weight is None:
            return self.read(node)
        return self.write_for_float(weight)

    def write_for_float(self, weight: Stored) -> str:
        is_folded = self.translation.profile.float_ops == "folded"
        return weight.write_folded(self.writer) if is_folded else weight.write(self.writer)

    def sizes(self, given: Sequence[Any]) -> str:
        """Sizes as a vector; those that vary are computed."""
        if all(isinstance(size, int) for size in given):
            return self.writer.numbers(list(given))
        parts = [
            self.translation.value(size) if isinstance(size, fx.Node) else self.writer.numbers([int(size)])
            for size in given
        ]
        return self.emit("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def number(self, given: Any) -> str:
        """One size as a vector of one."""
        return self.sizes([given])

    def size(self, value: str, axis: int) -> str:
        """The size of a tensor along an axis, as a vector of one."""
        return self.emit("Shape", value, start=axis, end=axis + 1)

    def shape_of(self, node: fx.Node) -> str:
        """The sizes of what a node yields, as a vector: numbers where they are known."""
        kind = self.type(node)
        if kind.is_static:
            return self.writer.numbers([int(size) for size in kind.shape])
        return self.emit("Shape", self.translation.value(node))

    def refuse(self, why: str) -> NoOnnxFormError:
        """The error to raise."""
        return NoOnnxFormError(why)


Entry = Callable[[Call], Value]
ENTRIES: dict[str, Entry] = {}
"""By the name of the op."""
MODULES = (
    "write_compositions",
    "write_elementwise",
    "write_moves",
    "write_pools",
    "write_products",
    "write_qdq",
    "write_recurrent",
    "write_reductions",
    "write_selections",
    "write_sizes",
)
"""Where the entries are."""


def writes(*ops: str) -> Callable[[Entry], Entry]:
    """Write ops in this way."""

    def add(entry: Entry) -> Entry:
        for op in ops:
            ENTRIES[op] = entry
        return entry

    return add


def along_an_axis(entry: Entry) -> Entry:
    """An op along an axis of its first operand. A tensor without axes, which torch takes as a vector of one, is written as
    such, and what comes of it has no axes again."""

    @wraps(entry)
    def write(call: Call) -> Value:
        source: Any = call.node.args[0]
        values = call.translation.values
        if call.type(source).rank:
            return entry(call)
        kept = values[source] = call.translation.value(source)
        values[source] = call.emit("Reshape", str(kept), call.writer.numbers([1]))
        made = entry(call)
        values[source] = kept
        none = call.writer.numbers([])
        if isinstance(made, str):
            return call.emit("Reshape", made, none)
        return tuple(call.emit("Reshape", each, none) for each in made)

    return write


def entries() -> dict[str, Entry]:
    """The whole table."""
    for name in MODULES:
        import_module(f"quantc.targets.onnx.{name}")
    return ENTRIES


def entry_for(node: fx.Node) -> Entry:
    """How an op is written, or NoOnnxFormError."""
    found = entries().get(op_name(node))
    if found is None:
        raise NoOnnxFormError(f"{op_name(node)} has no ONNX form here")
    return found
