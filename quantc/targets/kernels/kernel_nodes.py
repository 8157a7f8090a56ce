"""The kernels of a program: the nodes that run one, and what reads them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from quantc.ir.dialect import is_opaque
from quantc.ir.program import Program, attribute
from quantc.ir.types import TensorType, type_of
from quantc.targets.kernels.kernel import Kernel

PREFIX = "kernel_"
"""Prefix of a kernel's name; the name of the op it runs follows."""
BY_MEMORY: tuple[Any, ...] = (torch.ops.aten.as_strided.default,)
"""Ops whose result depends on how what they read lies in memory."""
CHANNELS_LAST = (4, 5)
"""The numbers of axes of tensors that can lie channels last."""


def kernel_of(program: Program, node: fx.Node) -> Kernel | None:
    """The kernel that a node runs; None if it runs none."""
    found = attribute(program.owner(node.graph), str(node.target)) if node.op == "call_module" else None
    return found if isinstance(found, Kernel) else None


def kernels_of(program: Program, graph: fx.Graph) -> Iterator[tuple[fx.Node, Kernel]]:
    """Nodes of a graph that run a kernel, with their kernels."""
    for node in graph.find_nodes(op="call_module", sort=True):
        found = kernel_of(program, node)
        if found is not None:
            yield node, found


def tell_kernel(program: Program, node: fx.Node, kernel: str) -> None:
    """Name the kernel that now runs the ops of a node, in their rows."""
    ops = program.placements.ops
    for key in program.placements.keys(node):
        ops[key] = replace(ops[key], kernel=kernel)


def forget_kernel(owner: nn.Module, target: str) -> None:
    """Take a kernel that no node runs any more out of the module that has it."""
    path, _, name = target.rpartition(".")
    del owner.get_submodule(path)._modules[name]


def is_read_in_order(program: Program, node: fx.Node) -> bool:
    """True if some user of a node depends on its memory format. Items of a tuple are looked through."""
    return not all(
        not is_read_in_order(program, user) if user.target is operator.getitem else _takes_any_order(program, user)
        for user in node.users
    )


def _takes_any_order(program: Program, reader: fx.Node) -> bool:
    """True if a node accepts any memory format: most ATen ops do, since `view` is normalized to `reshape`."""
    if reader.op == "call_module":
        kernel = kernel_of(program, reader)
        return kernel is not None and kernel.any_order
    is_aten = isinstance(reader.target, OpOverload) and reader.target.namespace == "aten"
    return is_aten and not is_opaque(reader) and reader.target not in BY_MEMORY


def is_image(node: fx.Node) -> bool:
    """True if a node's value can be channels last."""
    kind = type_of(node)
    return isinstance(kind, TensorType) and kind.rank in CHANNELS_LAST
