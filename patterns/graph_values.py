"""Queries of the matcher about values in a graph. None of these raise, whatever the graph holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import BY_NAME, SYMBOLIC, op_name
from quantc.ir.types import DTYPE_NAMES, ScalarType, tensor_type
from quantc.patterns.operand_patterns import Leaf
from quantc.patterns.refusals import Cause, UnknownType, WrongType

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, ScalarType)
_SIZE = BY_NAME["sym_size"].target


def argument_at(node: fx.Node, index: int, rows: tuple[tuple[str, Any], ...]) -> Any:
    """A call's argument by position, or by keyword, or its default. `rows` holds (ATen name, default)."""
    args = node.args
    if index < len(args):
        return args[index]
    name, default = rows[index]
    return node.kwargs.get(name, default)


def is_tensor_node(value: Any) -> bool:
    """True if `value` is a node, and not one known to yield a number (such as a size)."""
    if not isinstance(value, fx.Node):
        return False
    found = value.meta.get("val")
    if found is None:
        return value.target is not _SIZE and (value.op != "call_function" or value.target not in SYMBOLIC)
    return not isinstance(found, _NUMBERS)


def has_node(value: Any) -> bool:
    """True if an argument is computed, wholly or in part."""
    if isinstance(value, list | tuple):
        return any(isinstance(item, fx.Node) for item in value)
    return isinstance(value, fx.Node | torch.SymInt | torch.SymFloat | torch.SymBool)


def why_not_type(value: Any, leaf: Leaf) -> Cause | None:
    """The reason why a node's type does not satisfy `leaf`."""
    found = tensor_type(value)
    if found is None:
        return UnknownType(value, f"the type of {show(value)} is unknown, and {leaf} needs to know it")
    if leaf.dtypes and DTYPE_NAMES.get(found.dtype, "") not in leaf.dtypes:
        text = f"{show(value)} is {found}, wanted {' or '.join(leaf.dtypes)}"
        return WrongType(value, found, leaf.dtypes, leaf.ranks, text)
    if leaf.ranks and found.rank not in leaf.ranks:
        text = f"{show(value)} is {found}, wanted rank {' or '.join(map(str, leaf.ranks))}"
        return WrongType(value, found, leaf.dtypes, leaf.ranks, text)
    return None


def show(value: Any) -> str:
    """A value as text, for reasons."""
    if value is None:
        return "nothing"
    if isinstance(value, fx.Node):
        name = op_name(value)
        return value.name if name == value.name else f"{value.name} ({name})"
    if isinstance(value, list | tuple):
        shown = ", ".join(show(item) for item in value[:4])
        return f"[{shown}, … {len(value)} in all]" if len(value) > 4 else f"[{shown}]"
    return repr(value)
