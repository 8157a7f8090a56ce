"""Kernel fusion: absorb activation epilogues; merge sibling layers that share an input; fix memory formats.

Queries, keys and values are three GEMMs of one tensor. Merged, its input is scanned and packed once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.ir.dialect import is_opaque, op_name
from quantc.ir.program import Program, attribute
from quantc.ir.types import TensorType, TupleType, type_of
from quantc.targets.kernels.kernel import Kernel

PREFIX = "kernel_"
"""What the name of a kernel begins with; that of the op it runs follows."""
STANDS_FOR = "stands_for"


def stands_for(node: fx.Node) -> Any:
    """Name of the program's node whose value a lowered node computes; several for merged kernels."""
    return node.meta.get(STANDS_FOR, node.name.removeprefix(PREFIX))


def kernels_of(program: Program, graph: fx.Graph) -> Iterator[tuple[fx.Node, Kernel]]:
    """Nodes of a graph that run a kernel, with their kernels."""
    owner = program.owner(graph)
    for node in graph.find_nodes(op="call_module", sort=True):
        found = attribute(owner, str(node.target))
        if isinstance(found, Kernel):
            yield node, found


def absorb_readers(program: Program) -> None:
    """Fuse each kernel's single-user activation, and mark kernels whose consumers accept any memory format."""
    for _, graph in program.graphs():
        for node, kernel in list(kernels_of(program, graph)):
            reader = next(iter(node.users)) if len(node.users) == 1 else None
            if reader is not None and reader.all_input_nodes == [node] and kernel.absorb(op_name(reader)):
                node.meta[STANDS_FOR] = reader.name
                program.forward(reader, node)
            kernel.in_order = is_read_in_order(program, node)


def is_read_in_order(program: Program, node: fx.Node) -> bool:
    """True if some user of a node depends on its memory format."""
    return not all(_takes_any_order(program, user) for user in node.users)


def erase_unread(program: Program) -> None:
    """Erase kernels without users: another kernel has absorbed their work."""
    for _, graph in program.graphs():
        for node, _kernel in reversed(list(kernels_of(program, graph))):
            if not node.users:
                graph.erase_node(node)


def join_siblings(program: Program) -> dict[fx.Node, int]:
    """Merge kernels that read the same inputs; the merged nodes, each with the size of its group."""
    joined: dict[fx.Node, int] = {}
    for _, graph in program.graphs():
        alike: dict[tuple[object, ...], list[tuple[fx.Node, Kernel]]] = {}
        for node, kernel in kernels_of(program, graph):
            if kernel.joins is not None and not node.kwargs:
                alike.setdefault((type(kernel), kernel.joins, node.args), []).append((node, kernel))
        for group in alike.values():
            if len(group) > 1:
                _join(program, graph, group)
                joined.update({node: len(group) for node, _ in group})
    return joined


def _join(program: Program, graph: fx.Graph, group: list[tuple[fx.Node, Kernel]]) -> None:
    nodes, kernels = [node for node, _ in group], [kernel for _, kernel in group]
    first = nodes[0]
    together = type(kernels[0]).joined(kernels)
    together.made_of = tuple(kernels)
    name = f"{first.target}_and_{len(nodes) - 1}_more"
    program.owner(graph).add_module(name, together)
    whole = program.emit(name, first.args, before=first)
    whole.meta["val"] = TupleType(tuple(type_of(node) for node in nodes))
    parts = [
        program.emit(operator.getitem, (whole, index), before=first, like=node) for index, node in enumerate(nodes)
    ]
    whole.meta[STANDS_FOR] = tuple(stands_for(node) for node in nodes)
    for node, part in zip(nodes, parts, strict=True):
        part.meta[STANDS_FOR] = stands_for(node)
        program.replace(node, part)


def _takes_any_order(program: Program, reader: fx.Node) -> bool:
    """True if a node accepts any memory format: most ATen ops do, since `view` is normalized to `reshape`."""
    if reader.op == "call_module":
        kernel = attribute(program.owner(reader.graph), str(reader.target))
        return isinstance(kernel, Kernel) and kernel.any_order
    is_aten = isinstance(reader.target, OpOverload) and reader.target.namespace == "aten"
    return is_aten and not is_opaque(reader) and reader.target not in BY_MEMORY


BY_MEMORY: tuple[Any, ...] = (torch.ops.aten.as_strided.default,)
"""Ops whose result depends on how what they read lies in memory."""


def in_usual_order(program: Program) -> None:
    """Restore the model's memory format for outputs and for ops that depend on strides: contiguous tensors and views of
    such. Kernels yield channels-last images, and ATen ops propagate that.
    """
    for _, graph in program.graphs():
        for node in [node for node in graph.nodes if node.target in BY_MEMORY or node.op == "output"]:
            # only the first argument's memory matters; sizes may be nodes too
            for source in node.all_input_nodes if node.op == "output" else node.all_input_nodes[:1]:
                if node.op == "output" and _keeps_views(program, source):
                    continue
                reader, whole = (node, source) if node.target in BY_MEMORY else _below_views(node, source)
                if not (is_image(whole) or is_image(source) or node.target in BY_MEMORY):
                    continue
                if whole.op == "call_function" or (whole.op == "call_module" and reader is not node):
                    target = torch.ops.aten.contiguous.default
                    made = program.emit(target, (whole,), before=reader, like=whole, value=type_of(whole))
                    reader.replace_input_with(whole, made)


def _keeps_views(program: Program, result: fx.Node) -> bool:
    """Make a kernel that yields a result preserve the views of its input, as its op would: the tensor below the views
    is made contiguous, not the result. False if it is not such a kernel, or reads no view.
    """
    kernel = attribute(program.owner(result.graph), str(result.target)) if result.op == "call_module" else None
    source = result.args[0] if result.args else None
    if not isinstance(kernel, Kernel) or not kernel.keeps_order or not isinstance(source, fx.Node):
        return False
    reader, whole = _below_views(result, source)
    if reader is result:
        return False
    below = attribute(program.owner(whole.graph), str(whole.target)) if whole.op == "call_module" else None
    if isinstance(below, Kernel):
        below.in_order = True
    elif whole.op == "call_function":
        made = program.emit(
            torch.ops.aten.contiguous.default, (whole,), before=reader, like=whole, value=type_of(whole)
        )
        reader.replace_input_with(whole, made)
    kernel.in_order = False
    return True


def is_image(node: fx.Node) -> bool:
    """True if a node's value can be channels last."""
    kind = type_of(node)
    return isinstance(kind, TensorType) and kind.rank in CHANNELS_LAST


def _below_views(reader: fx.Node, source: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The tensor that a result is a view of, and who reads it there: the result itself where it is none."""
    while isinstance(source.target, OpOverload) and source.target.is_view and isinstance(source.args[0], fx.Node):
        reader, source = source, source.args[0]
    return reader, source


CHANNELS_LAST = (4, 5)
"""The numbers of axes of tensors that can lie channels last."""
