"""Refusal of ops that rebind a tensor to other memory, or resize it, under its existing names.

A graph names values. After `y.data = other`, `y.set_(other)` or `y.resize_(2, 8)` the name `y` refers to other memory,
but views taken before do not, and no alias analysis of a graph can tell which is which.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from quantc.capture.refused_trace import RefusedError
from quantc.capture.source_lines import is_user_code
from quantc.errors import CaptureError
from quantc.ir.alias_analysis import Aliasing
from quantc.ir.dialect import arguments
from quantc.ir.program import Program
from quantc.ir.types import TensorType, TupleType, tensor_type, type_of

REBINDING = frozenset({"set_", "resize_", "resize_as_", "resize_as_sparse_", "_resize_output_", "set_data"})
"""ATen ops after which a tensor has other memory or another size."""
ASSIGNED = "copy__default"
"""Name of the copies that torch.export appends for assigned buffers; a copy in a model is `copy_`."""
ADVICE = "give the new tensor a name of its own (y = other), or write its numbers into the old one (y.copy_(other))"


def refuse_rebinding(program: Program) -> None:
    """Refuse a program in which an op rebinds a tensor's memory, or `out=` resizes it."""
    for node in program.nodes():
        if not isinstance(node.target, OpOverload):
            continue
        name = node.target._schema.name.rpartition("::")[2]
        what = f"{name} gives a tensor other memory" if name in REBINDING else _why_resized(node)
        if what is not None:
            origin = program.origins.get(node)
            place = f"{origin.file}:{origin.line}, " if origin is not None and origin.file else ""
            raise CaptureError(f"{program.name}: {what}", where=place + program.describe(node), advice=ADVICE)


def refuse_shared_memory(program: Program, original: Callable[[str], Any]) -> None:
    """Refuse a program that writes to a constant whose memory overlaps another constant that it reads: it has copies of both.

    `original` returns the model's tensor by its name in the program.
    """
    for _, graph in program.graphs():
        owner = program.owner(graph)
        aliasing = Aliasing(graph, owner)
        if not aliasing.has_writes:
            continue
        places = {node: original(str(node.target)) for node in graph.find_nodes(op="get_attr")}
        tensors = {node: tensor for node, tensor in places.items() if node.users and isinstance(tensor, torch.Tensor)}
        for node, tensor in tensors.items():
            twins = [
                other for other, held in tensors.items() if held is not tensor and _memory(held) == _memory(tensor)
            ]
            if twins and _memory(tensor) is not None and aliasing.is_written(node):
                raise CaptureError(
                    f"{program.name} writes to {node.target!r}, which shares memory with {str(twins[0].target)!r}",
                    where=program.describe(next(iter(twins[0].users), node)),
                    advice="give each buffer and parameter memory of its own, and take the part in forward: self.whole[0]",
                )
        _refuse_kept_view(program, graph, aliasing)


def _refuse_kept_view(program: Program, graph: fx.Graph, aliasing: Aliasing) -> None:
    """`v = self.state[0]; self.state = new; return v`: v is a part of the old tensor, and a program has one for both."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        origin, place = program.origins.get(node), node.args[0]
        is_added = origin is None or not origin.file or node.name.startswith(ASSIGNED)
        if is_added and isinstance(place, fx.Node) and place.op == "get_attr" and aliasing.returned(place):
            raise CaptureError(
                f"{program.name} returns memory of {place.target!r} and assigns it another tensor",
                where=program.describe(node),
                advice="return a copy: v.clone()",
            )


def _memory(tensor: torch.Tensor) -> int | None:
    """Storage address of a tensor; None without ordinary storage."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _why_resized(node: fx.Node) -> str | None:
    kind = type_of(node)
    made = kind.items if isinstance(kind, TupleType) else (kind,)
    for out, result in zip(outs(node), made, strict=False):
        given = tensor_type(out)
        if given is None or not isinstance(result, TensorType) or 0 in given.shape:
            continue
        if given.shape != result.shape:
            return resize_fault(node, given.shape)
    return None


def resize_fault(node: fx.Node, before: Any) -> str:
    return f"out= of {node.target} is of size {tuple(before)}, which the call changes"


def outs(node: fx.Node) -> list[fx.Node]:
    """Arguments passed as `out=` and the like."""
    if not isinstance(node.target, OpOverload):
        return []
    named = [row.aten_name for row in arguments(node.target) if row.is_written and row.keyword_only]
    return [node.kwargs[name] for name in named if isinstance(node.kwargs.get(name), fx.Node)]  # type: ignore[misc]


@contextmanager
def data_kept() -> Iterator[None]:
    """Context manager that refuses `y.data = other` in a model's code. torch's own code may use it to move parameters."""
    inherited: Any = torch._C.TensorBase.data

    def give(tensor: torch.Tensor) -> Any:
        return inherited.__get__(tensor)

    def assign(tensor: torch.Tensor, value: Any) -> None:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            raise RefusedError("`.data` of a tensor is assigned, which gives it other memory; " + ADVICE)
        inherited.__set__(tensor, value)

    with patch.object(torch.Tensor, "data", property(give, assign), create=True):
        yield


__all__ = ["ADVICE", "data_kept", "outs", "refuse_rebinding", "refuse_shared_memory", "resize_fault"]
