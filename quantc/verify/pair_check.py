"""Pairs of quantize and dequantize: what one writes the other reads, at the same scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from quantc.ir.dialect import arguments
from quantc.ir.graph_tree import attribute

NAMESPACE = "quantized_decomposed"
QUANTIZE, DEQUANTIZE = "quantize_per_", "dequantize_per_"
FREE = frozenset({"input", "out_dtype"})
"""Arguments that the two need not have in common."""


def why_not_pair(node: fx.Node, target: OpOverload, owner: nn.Module) -> Iterator[str]:
    """Every argument in which a dequantize differs from the quantize that it reads."""
    if target.namespace != NAMESPACE or not target._opname.startswith(DEQUANTIZE) or not node.args:
        return
    source = node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(source.target, OpOverload):
        return
    if source.target.namespace != NAMESPACE or not source.target._opname.startswith(QUANTIZE):
        return
    if source.target._opname != target._opname.removeprefix("de"):
        yield f"{target._opname} reads what {source.target._opname} writes: %{source.name}"
        return
    mine, theirs = _named(node, target), _named(source, source.target)
    for name in mine.keys() & theirs.keys() - FREE:
        if not _same(mine[name], theirs[name], owner):
            yield f"its {name} is {_told(mine[name])}, and that of %{source.name}, which it reads, {_told(theirs[name])}"


def _named(node: fx.Node, target: OpOverload) -> dict[str, Any]:
    rows = arguments(target)
    given = {row.aten_name: value for row, value in zip(rows, node.args, strict=False)}
    return {**{row.aten_name: row.default for row in rows if row.has_default}, **given, **node.kwargs}


def _same(left: Any, right: Any, owner: nn.Module) -> bool:
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        if left is right:
            return True
        mine, theirs = (_constant(node, owner) for node in (left, right))
        if mine is None or theirs is None:
            return mine is theirs and left.op != "get_attr"  # computed: not known
        return mine.is_meta or theirs.is_meta or torch.equal(mine, theirs)
    return type(left) is type(right) and left == right


def _constant(node: fx.Node, owner: nn.Module) -> torch.Tensor | None:
    value = attribute(owner, str(node.target)) if node.op == "get_attr" else None
    return value if isinstance(value, torch.Tensor) else None


def _told(value: Any) -> str:
    return f"%{value.name}" if isinstance(value, fx.Node) else repr(value)
