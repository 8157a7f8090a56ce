"""Tracer for functions of ATen ops: runs them on proxies and writes each op they call as a node of a program.

References become part of a graph this way. A proxy knows the type of its node, so the function may read shapes and
dtypes. Dynamic sizes are read from a tensor at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

from quantc.errors import RefusedError
from quantc.integer.symbolic_sizes import Sizes
from quantc.ir.program import Program
from quantc.ir.types import ScalarType, TensorType, TupleType, ValueType, tensor_type

aten = torch.ops.aten
ARITHMETIC: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
}


class Traced:
    """Proxy of a node's tensor."""

    def __init__(self, node: fx.Node, fake: torch.Tensor | None) -> None:
        self.node = node
        self.fake = fake
        """A tensor of its type, without numbers; None if the type is unknown."""
        # read here, because while a function is being written even this would be taken for one of its calls
        self._type = None if fake is None else (tuple(fake.shape), fake.dtype)

    @property
    def _known_type(self) -> tuple[tuple[int, ...], torch.dtype]:
        if self._type is None:
            raise RefusedError(f"the type of {self.node.name} is unknown", advice="capture with example inputs")
        return self._type

    @property
    def shape(self) -> tuple[int, ...]:
        return self._known_type[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._known_type[1]

    def dim(self) -> int:
        return len(self.shape)


class OpWriter:
    """Traces functions into one program. Nodes must be written in graph order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = Sizes(program)
        self._places: dict[tuple[fx.Graph, Any], tuple[fx.Node, int]] = {}
        """For each dynamic size of a graph, a tensor that has it, and where."""
        self._read: dict[tuple[fx.Graph, Any], fx.Node] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        """Cached results by arguments: programs repeat the same few calls."""

    def write(self, function: Callable[..., Any], args: tuple[Any, ...], before: fx.Node, **kwargs: Any) -> Any:
        """Call a function with proxies for the nodes among its arguments. Returns the node, or nodes, of its result."""
        given, named = pytree.tree_map_only(fx.Node, self.traced, (args, kwargs))
        with _Recording(self, before):
            result = function(*given, **named)
        return pytree.tree_map_only(Traced, lambda traced: traced.node, result)

    def traced(self, node: fx.Node) -> Traced:
        kind = tensor_type(node)
        return self._at(node, None if kind is None else self.sizes.tensor(kind))

    def _at(self, node: fx.Node, fake: torch.Tensor | None) -> Traced:
        shape: tuple[Any, ...] = () if fake is None else fake.shape
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                self._places.setdefault((node.graph, size.node.expr), (node, dim))
        return Traced(node, fake)

    def call(self, target: Any, args: Any, kwargs: Any, before: fx.Node) -> Any:
        """Write one call; proxy of its result. A cast to the tensor's own dtype is not written."""
        if target is aten.to.dtype and args[0].fake is not None and args[0].dtype == args[1] and len(args) == 2:
            return args[0]
        fake = self._run(target, args, kwargs)
        given, named = pytree.tree_map_only(Traced, lambda traced: traced.node, (args, kwargs))
        given, named = pytree.tree_map_only(
            torch.SymInt, lambda size: self._number(size.node.expr, before), (given, named)
        )
        node = self.program.emit(target, tuple(given), named, before=before, value=self._type(fake))
        if isinstance(fake, tuple | list):
            return tuple(self._item(node, index, item, before) for index, item in enumerate(fake))
        return self._at(node, fake)

    def _item(self, node: fx.Node, index: int, fake: torch.Tensor, before: fx.Node) -> Traced:
        item = self.program.emit(operator.getitem, (node, index), before=before, value=self._type(fake))
        return self._at(item, fake)

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Result of a call on fake tensors; None if an operand's type is unknown."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Traced) and leaf.fake is None for leaf in leaves):
            return None
        key = (target, *map(self._kind, leaves), pytree.tree_structure((args, kwargs)))
        if key not in self._results:
            given, named = pytree.tree_map_only(Traced, lambda traced: traced.fake, (args, kwargs))
            with torch.no_grad():
                self._results[key] = self.sizes.run(target, given, named)
        return self._results[key]

    def _kind(self, leaf: Any) -> Any:
        """Cache key of an argument: a tensor's type; of a float only that it is one."""
        if isinstance(leaf, Traced):
            return self._type(leaf.fake)
        return str(leaf.node.expr) if isinstance(leaf, torch.SymInt) else float if isinstance(leaf, float) else leaf

    def _type(self, fake: Any) -> ValueType | None:
        if isinstance(fake, tuple | list):
            return TupleType(tuple(self._type(item) for item in fake))
        if fake is None:
            return None
        return TensorType(fake.dtype, tuple(self.sizes.text(size) for size in fake.shape))

    def _number(self, size: Any, before: fx.Node) -> int | fx.Node:
        """A size as an argument: a number, or a node that reads or calculates it."""
        if size.is_number:
            return int(size)
        key = (before.graph, size)
        if key not in self._read:
            self._read[key] = self._size_node(size, before)
        return self._read[key]

    def _size_node(self, size: Any, before: fx.Node) -> fx.Node:
        place = self._places.get((before.graph, size))
        if place is not None:
            return self.program.emit(aten.sym_size.int, place, before=before, value=self._scalar(size))
        function = ARITHMETIC.get(size.func)
        if function is None:
            raise RefusedError(
                f"the size {self._scalar(size).value} cannot be calculated where it is needed",
                where=self.program.describe(before),
                advice="capture with fewer dynamic sizes, or convert with style='fused'",
            )
        made: Any = self._number(size.args[0], before)
        for index, part in enumerate(size.args[1:], 1):
            kind = self._scalar(size.func(*size.args[: index + 1]))
            made = self.program.emit(function, (made, self._number(part, before)), before=before, value=kind)
        found: fx.Node = made
        return found

    def _scalar(self, size: Any) -> ScalarType:
        return ScalarType("int", str(size.xreplace(self.sizes.names)))


class _Recording(TorchFunctionMode):
    """While it is on, calls of ops are written instead of run."""

    def __init__(self, writer: OpWriter, before: fx.Node) -> None:
        super().__init__()
        self.writer = writer
        self.before = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload | HigherOrderOperator):
            raise TypeError(f"{getattr(func, '__name__', func)} is no op of ATen, so it cannot be written into a graph")
        return self.writer.call(func, args, kwargs or {}, self.before)
