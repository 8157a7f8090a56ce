"""Tracing of one call to ATen nodes, on copies of the tensors it writes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from quantc.rewrite.functionalize import functional_overload, reshaping_form


def _writes_for_good(node: fx.Node) -> bool:
    """True if an op writes in place, and `canonicalize` would keep it so: the order of reads and writes would be unknown."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable or target is torch.ops.aten.copy_.default:
        return False
    arguments = target._schema.arguments
    is_special = any(row.name == "index" for row in arguments) or str(arguments[0].type) == "List[Tensor]"
    return is_special or (functional_overload(target) is None and reshaping_form(target) is None)


def aims_of(traced: fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that a graph writes to, whatever the data."""
    inputs = traced.graph.find_nodes(op="placeholder")
    found: set[int] = set()
    for node in traced.graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        for index, row in enumerate(node.target._schema.arguments):
            if row.alias_info is None or not row.alias_info.is_write:
                continue
            value = node.args[index] if index < len(node.args) else node.kwargs.get(row.name)
            for aim in value if isinstance(value, list | tuple) else [value]:
                while isinstance(aim, fx.Node) and aim.op == "call_function" and aim.args:
                    aim = aim.args[0]  # a view of it
                if aim in inputs:
                    found.add(inputs.index(aim))
    return frozenset(found)


def without_copies_back(traced: fx.GraphModule) -> fx.GraphModule:
    """Remove the final copies of a functional graph to its inputs: here the written values are results already."""
    for node in reversed(traced.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users and node.args[0].op == "placeholder":
            traced.graph.erase_node(node)
    return traced


def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors of a pytree, in order; those in dataclasses included."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found.extend(tensors_in([getattr(leaf, row.name) for row in fields(leaf)]))
    return found


def trace_call(func: Callable[..., Any], given: Any, writes: tuple[int, ...]) -> fx.GraphModule | None:
    """Trace the call to ATen nodes, on copies of the tensors it `writes` to; None if shapes depend on the data, or no graph can
    express it."""
    leaves, spec = pytree.tree_flatten(given)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    ids = [id(leaves[place]) for place in places]
    firsts = [ids.index(number) for number in ids]  # `x.add_(x)` writes to what it reads

    def call(*tensors: Tensor) -> Any:
        filled = list(leaves)
        own = [tensor.clone() if index in writes else tensor for index, tensor in enumerate(tensors)]
        own = [own[first] for first in firsts]
        for place, tensor in zip(places, own, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return [*tensors_in(func(*args, **kwargs)), *(own[index] for index in writes)]

    tensors = [leaves[place] for place in places]
    try:
        traced = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*tensors)
        if any(map(_writes_for_good, traced.graph.nodes)):
            functional = torch.func.functionalize(call, remove="mutations")
            traced = without_copies_back(make_fx(functional, tracing_mode="fake")(*tensors))
    except (RuntimeError, TypeError, ValueError, AssertionError, UnsupportedFakeTensorException):
        return None
    return traced
