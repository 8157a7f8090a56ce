"""Op translation table: op name to the function that writes it as ONNX, and the context these functions get."""

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
from quantc.targets.onnx.graph_builder import GraphBuilder
from quantc.targets.onnx.profiles import Profile
from quantc.targets.onnx.quantized_initializers import QuantizedInitializer, initializer_of

Value = str | tuple[str, ...]
"""The name of a result, or the names of several."""


class NoOnnxFormError(RefusedError):
    """Something without a form in ONNX, or in the subset that quantc writes."""


@dataclass(eq=False)
class Translation:
    """State of an export: the program, and the ONNX values written so far."""

    program: Program
    writer: GraphBuilder
    profile: Profile
    values: dict[fx.Node, Value] = field(default_factory=dict)
    bounds: dict[fx.Node, tuple[float | None, float | None]] = field(default_factory=dict)
    """Activations merged into the quantize op after them, by their bounds."""
    chosen: dict[fx.Node, str] = field(default_factory=dict)
    """The output of DynamicQuantizeLinear, by the `choose_qparams` node it replaces."""

    def value(self, node: fx.Node) -> str:
        """Name of a node's value. Constants are written lazily, at first use."""
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
        weight = initializer_of(self.program, node)
        if weight is None:
            raise NoOnnxFormError(f"{node.name} is no tensor")
        before, self.writer.scope = self.writer.scope, node.name
        name = weight.write(self.writer)
        self.writer.scope = before
        return name

    def levels_of(self, node: Any) -> tuple[str, str, str] | None:
        """Levels, scale and zero point of a tensor that `node` dequantizes with per-tensor qparams found at run time; else None."""
        if not isinstance(node, fx.Node) or op_name(node) != "quantized_decomposed.dequantize_per_tensor.tensor":
            return None
        levels, scale, zero_point = (self.value(given) for given in node.args[:3])  # type: ignore[arg-type]
        return (levels, scale, zero_point) if dtype_of(node.args[0]) in (torch.int8, torch.uint8) else None

    def stored(self, node: Any) -> QuantizedInitializer | None:
        """The quantized constant that a node dequantizes; None if there is none."""
        return initializer_of(self.program, node)


@dataclass(frozen=True, eq=False)
class OpCall:
    """One op with its arguments."""

    translation: Translation
    node: fx.Node

    @property
    def writer(self) -> GraphBuilder:
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
        """Type of the result."""
        return self.type(self.node)

    def type(self, node: Any) -> TensorType:
        """Type of a node's value; NoOnnxFormError if unknown."""
        found = tensor_type(node)
        if found is None:
            raise NoOnnxFormError(f"the shape of {getattr(node, 'name', node)} is unknown: capture with example inputs")
        return found

    def rank(self, name: str = "x") -> int:
        return self.type(self[name]).rank

    def axis(self, given: int, rank: int | None = None) -> int:
        """A non-negative axis."""
        rank = self.rank() if rank is None else rank
        return int(given) % max(rank, 1)

    def axes(self, given: Any, rank: int | None = None) -> list[int]:
        """Non-negative axes."""
        rank = self.rank() if rank is None else rank
        listed = [given] if isinstance(given, int) else list(given)
        return [self.axis(each, rank) for each in listed]

    def axes_or_all(self, given: Any, rank: int | None = None) -> list[int]:
        """Axes of a reduction: an empty list or None means all."""
        rank = self.rank() if rank is None else rank
        return self.axes(range(rank) if given is None or given == [] else given, rank)

    def fixed(self, name: str = "x") -> tuple[int, ...]:
        """Sizes of an operand after the first axis; these must be static."""
        found = self.type(self[name])
        if not all(isinstance(size, int) for size in found.shape[1:]):
            raise NoOnnxFormError(f"the sizes of {self[name].name} vary: {found}")
        return tuple(int(size) for size in found.shape[1:])

    # -- values --------------------------------------------------------------------------------------------------------

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> str:
        """An operand by name, cast to `dtype` if given."""
        return self.read(self[name], dtype)

    def read(self, given: Any, dtype: torch.dtype | None = None) -> str:
        """An argument as a tensor: a node's value or a number."""
        if not isinstance(given, fx.Node):
            return self.writer.scalar(given, dtype if dtype is not None else torch.float32)
        name = self.translation.value(given)
        kind = type_of(given)
        own = torch.int64 if isinstance(kind, ScalarType) else None if not isinstance(kind, TensorType) else kind.dtype
        return name if dtype is None or own == dtype else self.writer.cast(name, dtype)

    def for_float(self, node: Any) -> str:
        """A weight for an op that computes in float, in the form its runtime expects."""
        weight = self.translation.stored(node)
        if weight is None:
            return self.read(node)
        return self.write_for_float(weight)

    def write_for_float(self, weight: QuantizedInitializer) -> str:
        is_folded = self.translation.profile.float_ops == "folded"
        return weight.write_folded(self.writer) if is_folded else weight.write(self.writer)

    def sizes(self, given: Sequence[Any]) -> str:
        """Sizes as a vector; dynamic ones are computed."""
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
        """Size of a tensor along an axis, as a vector of one."""
        return self.emit("Shape", value, start=axis, end=axis + 1)

    def shape_of(self, node: fx.Node) -> str:
        """Sizes of a node's value, as a vector: constant if static."""
        kind = self.type(node)
        if kind.is_static:
            return self.writer.numbers([int(size) for size in kind.shape])
        return self.emit("Shape", self.translation.value(node))

    def refuse(self, why: str) -> NoOnnxFormError:
        """The error to raise."""
        return NoOnnxFormError(why)


Entry = Callable[[OpCall], Value]
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
"""Modules that register writers."""


def writes(*ops: str) -> Callable[[Entry], Entry]:
    """Register a writer for ops."""

    def add(entry: Entry) -> Entry:
        for op in ops:
            ENTRIES[op] = entry
        return entry

    return add


def along_an_axis(entry: Entry) -> Entry:
    """Decorator for ops along an axis of the first operand. torch treats rank-0 tensors as vectors of one: they are
    written so, and the result is reshaped to rank 0 again.
    """

    @wraps(entry)
    def write(call: OpCall) -> Value:
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
    """The whole table, with all writer modules imported."""
    for name in MODULES:
        import_module(f"quantc.targets.onnx.{name}")
    return ENTRIES


def entry_for(node: fx.Node) -> Entry:
    """Writer of an op, or NoOnnxFormError."""
    found = entries().get(op_name(node))
    if found is None:
        raise NoOnnxFormError(f"{op_name(node)} has no ONNX form here")
    return found
