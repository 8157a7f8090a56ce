"""Functionalization of ops that write: `relu_` → `relu`, `add(..., out=y)` → `add`."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import map_arg

from quantc.ir.dialect import arguments, aten, may_alias, overload_names, short_name
from quantc.ir.program import Program
from quantc.ir.types import dtype_of, tensor_type
from quantc.rewrite.infer_dtype import proven_dtype

SPECIAL = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor"}

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal")
SOME_SIZE = 4
TESTS = frozenset({*COMPARISONS, "logical_and", "logical_or", "logical_xor", "logical_not"})


@cache
def functional_overload(target: OpOverload) -> OpOverload | None:
    """The overload with the same arguments that returns a new tensor."""
    if target is aten.transpose_.default:
        return aten.transpose.int
    name = target._schema.name.removeprefix("aten::")
    base = SPECIAL.get(name, name.removesuffix("_"))
    packet = getattr(aten, base, None)
    if base == name or not isinstance(packet, OpOverloadPacket):
        return None
    overloads: list[OpOverload] = [getattr(packet, each) for each in overload_names(packet)]
    # of the same name, if it is there: `pow_.Scalar` is `pow.Tensor_Scalar`, and `pow.Scalar` is something else
    overloads.sort(key=lambda overload: overload._overloadname != target._overloadname)
    fitting = (each for each in overloads if not each._schema.is_mutable and _takes(each) == _takes(target))
    return next(fitting, None)


def _takes(target: OpOverload) -> list[tuple[str, bool]]:
    return [(str(row.type), row.has_default_value()) for row in target._schema.arguments]


@cache
def reshaping_form(target: OpOverload) -> OpOverload | None:
    """The view op for `unsqueeze_`, `transpose_` and the like, which change a tensor's shape but not its data."""
    if torch.Tag.inplace_view not in target.tags:
        return None
    view = functional_overload(target)
    return view if view is not None and may_alias(view) else None


@cache
def returning_overload(target: OpOverload) -> OpOverload | None:
    """For `add.out` and the like: the overload without `out=`, which returns a new tensor."""
    rows = arguments(target)
    if not rows or not (rows[-1].is_written and rows[-1].keyword_only) or sum(row.is_written for row in rows) != 1:
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._schema.name.rpartition("::")[2])
    wanted = [(row.aten_name, row.type) for row in rows[:-1]]
    for each in (getattr(packet, name) for name in overload_names(packet)):
        if not each._schema.is_mutable and [(row.aten_name, row.type) for row in arguments(each)] == wanted:
            return None if may_alias(each) else cast("OpOverload", each)
    return None


def _out_result(program: Program, node: fx.Node, target: OpOverload) -> fx.Node | None:
    """The result of a call with `out=` as a new tensor; None unless it is known to have the type of the one written
    to."""
    functional, (name, out) = returning_overload(target), next(reversed(node.kwargs.items()), ("", None))
    rest = {key: value for key, value in node.kwargs.items() if value is not out}
    written = tensor_type(out)
    if functional is None or written is None or name != arguments(target)[-1].aten_name:
        return None
    if _dtype_by_running(functional, node.args, rest) != written.dtype:
        return None
    return program.emit(functional, node.args, rest, before=node, like=node)


def _dtype_by_running(target: OpOverload, args: Any, kwargs: Any) -> torch.dtype | None:
    """The result dtype of an op for operands of these types, found by running it; dynamic sizes are arbitrary."""

    def hollow(operand: fx.Node) -> Any:
        kind = tensor_type(operand)
        if kind is None:
            raise TypeError(f"{operand.name} is not known to be a tensor")
        sizes = [SOME_SIZE if isinstance(size, str) else size for size in kind.shape]
        return torch.empty(sizes, dtype=kind.dtype, device="meta")

    try:
        given, named = map_arg((args, kwargs), hollow)
        made = target(*given, **named)
    except Exception:  # noqa: BLE001 - an op that is not run on stand-ins stays as it is
        return None
    return made.dtype if isinstance(made, torch.Tensor) else None


def functional_form(program: Program, node: fx.Node) -> fx.Node | None:
    """A node with the value that `node` leaves in the tensor it writes to; None if that cannot be shown."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    if target is aten.copy_.default:
        return _whole_copy(program, node)
    if (view := reshaping_form(target)) is not None:
        return program.emit(view, node.args, dict(node.kwargs), before=node, like=node)
    functional = functional_overload(target)
    if functional is None:
        return _out_result(program, node, target)
    if not _keeps_dtype(node):
        return None
    return program.emit(functional, node.args, dict(node.kwargs), before=node, like=node)


def _whole_copy(program: Program, node: fx.Node) -> fx.Node | None:
    """Overwriting a whole tensor with one of the same type is a copy of the latter."""
    destination, source = node.args[:2]
    if (
        isinstance(source, fx.Node)
        and tensor_type(source) is not None
        and tensor_type(source) == tensor_type(destination)
    ):
        return program.emit(aten.clone.default, (source,), before=node, like=node)
    return None


def _keeps_dtype(node: fx.Node) -> bool:
    """True if the functional op yields the dtype of the written tensor, rather than promoting it."""
    tensors = node.all_input_nodes
    written = node.args[0]
    dtype = proven_dtype(written)
    numbers = [
        value for value in node.args[1:] if isinstance(value, int | float | complex) and not isinstance(value, bool)
    ]
    if dtype is None:
        # without types: one tensor alone cannot be promoted, unless by a number of a wider kind
        return len(tensors) == 1 and not _is_test(node) and not any(isinstance(value, complex) for value in numbers)
    if _is_test(node):
        return dtype is torch.bool
    if any(proven_dtype(operand) != dtype for operand in tensors if not _is_index(node, operand)):
        return False
    return dtype.is_floating_point or dtype.is_complex or all(isinstance(value, int) for value in numbers)


def _is_test(node: fx.Node) -> bool:
    """True if the functional op returns booleans, where the in-place op writes ones and zeros."""
    return short_name(node.target) in TESTS


def _is_index(node: fx.Node, operand: fx.Node) -> bool:
    """True for index and mask operands, which take no part in type promotion."""
    if operand is node.args[0]:
        return False
    name, dtype = str(node.target), dtype_of(operand)
    return ("index" in name and dtype in (torch.bool, torch.int64)) or ("masked" in name and dtype is torch.bool)
