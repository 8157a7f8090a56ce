"""Lowering of matches that only move the values of one quantized tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from quantc.integer.lowerings.requantize import End, ends_of, hand_on, is_read_in_float
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.ir.dialect import op_name
from quantc.ir.site_index import outputs_of
from quantc.ir.types import TensorType, TupleType, ValueType, tensor_type, type_of

INDICES = ("max_pool2d_with_indices", *(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)))
"""Ops whose second result says where the values were."""


class Move:
    """The moved tensor and its users, determined before anything is changed."""

    def __init__(self, task: Task) -> None:
        if task.tail:
            raise NotIntegerError(f"{task.tail[0].name} follows it in the match")
        self.task = task
        self.dequantize: Any = task.core.args[0]  # `x`; ops outside the dialect name it differently
        self.source = task.whole(self.dequantize)
        self.ends: dict[fx.Node, list[End]] = {item: ends_of(task, item) for item in outputs_of(task.core)}
        where = [item.name for item in self.ends if op_name(task.core) in INDICES and item.args[1] == 1]
        if where:
            raise NotIntegerError(f"{where[0]} reads where the values were")

    @property
    def is_read_in_float(self) -> bool:
        return any(is_read_in_float(item) for item in self.ends)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.grid.dtype

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Shape of the tensor that is moved."""
        kind = tensor_type(self.dequantize)
        if kind is None:
            raise NotIntegerError("its shape is not known; capture with example inputs")
        return kind.shape

    @property
    def result_shape(self) -> tuple[int | str, ...]:
        """Shape of the result."""
        kind = tensor_type(self.task.core)
        if kind is None:
            raise NotIntegerError("its shape is not known; capture with example inputs")
        return kind.shape

    def size(self, axis: int) -> int:
        """Size of an axis; it must be static."""
        size = self.shape[axis]
        if not isinstance(size, int):
            raise NotIntegerError(f"the size of axis {axis} is not known before it runs")
        return size

    def emit(self, target: Any, *args: Any, shape: Sequence[int | str], dtype: torch.dtype | None = None) -> fx.Node:
        """Emit a step with a shape of its own."""
        task = self.task
        kind = TensorType(dtype if dtype is not None else self.dtype, tuple(shape))
        return task.program.emit(target, args, before=task.root, like=task.core, value=kind)

    def same(self, target: Any = None, *args: Any) -> fx.Node:
        """The op itself on integers; or another target with its own arguments and the same result type."""
        core = self.task.core
        kwargs: dict[str, Any] = {}
        if target is None:
            target = core.target
            args, kwargs = map_arg((core.args, core.kwargs), self._integers)
        kind = _with_dtype(type_of(core), self.dtype)
        return self.task.program.emit(target, args, kwargs, before=self.task.root, like=core, value=kind)

    def _integers(self, value: fx.Node) -> fx.Node:
        return self.source.node if value is self.dequantize else value

    def finish(self, moved: fx.Node, computes: fx.Node | None = None) -> None:
        """Replace the op's results by the integers `moved`, or by its items if the op yields several tensors.

        `computes` is the step that does the work, if it is not the last one.
        """
        self.task.claim(computes if computes is not None else moved)
        for old, ends in self.ends.items():
            made = moved if old is self.task.core else self._item(moved, old)
            hand_on(self.task, old, Quantized(made, self.source.grid), self.dequantize, ends)

    def finish_values(self, values: fx.Node) -> None:
        """Like `finish`, where the op yields several tensors and only the first, now `values`, is read."""
        self.task.claim(values)
        for old, ends in self.ends.items():
            hand_on(self.task, old, Quantized(values, self.source.grid), self.dequantize, ends)

    def _item(self, moved: fx.Node, old: fx.Node) -> fx.Node:
        kind = _with_dtype(type_of(old), self.dtype)
        args = (moved, *old.args[1:])
        target: Any = old.target
        return self.task.program.emit(target, args, before=self.task.root, like=old, value=kind)


def _with_dtype(kind: ValueType | None, dtype: torch.dtype) -> ValueType | None:
    """A type with integers of a dtype where it has floats."""
    if isinstance(kind, TupleType):
        return TupleType(tuple(_with_dtype(item, dtype) for item in kind.items))
    if isinstance(kind, TensorType) and kind.dtype.is_floating_point:
        return TensorType(dtype, kind.shape)
    return kind
