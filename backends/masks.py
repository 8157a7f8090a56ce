"""Mask detection: keeps rules from quantizing attention masks.

A mask removes positions from a softmax by adding, or filling in, a far number: -1e4, the lowest float, minus infinity.
A range that includes it would leave no resolution for the scores themselves, so no rule quantizes a tensor that may
hold one. The tensors around it are quantized as usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import ADDING, BY_TARGET, ops_in, target_name
from quantc.ir.op_row import Family, Trait
from quantc.ir.program import Program
from quantc.ir.types import dtype_of
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Match

NO_MASK = "no-mask"
"""The name of the condition."""
FAR = 1e3
"""A number this large, or larger, is taken for a mask."""
MAX_STEPS = 12
MAX_NODES = 48
"""Bounds of the search: steps from the operand, and nodes in all."""
MAX_READERS = 4

SUMS = frozenset({"add", "sub", "rsub"})
FILLS = (
    SUMS
    | {"mul", "masked_fill", "pad"}
    | {f"aten.where.{overload}" for overload in ("ScalarOther", "ScalarSelf", "Scalar")}
    | {f"aten.{name}.default" for name in ("full", "full_like", "new_full", "scalar_tensor")}
)
"""Ops that can bring a far number in."""
THROUGH = (
    FILLS
    | {"where", "div", "neg", "maximum", "minimum", "clamp", "cast"}
    | {"aten.masked_fill.Tensor", "aten.triu.default", "aten.tril.default"}
)
"""Ops that hand a mask on, beside those that preserve values. Not among them: what bounds its result, as softmax."""
SOFTMAX = frozenset({*ops_in(Family.SOFTMAX), "aten._safe_softmax.default"})


@predicate(NO_MASK)
def why_not_without_mask(match: Match) -> str | None:
    """No operand may hold a mask, nor be added to a possible one."""
    for name, bound in match.bindings.items():
        if _is_far(bound):
            return f"{name} is {bound!r}, which is as far away as a mask"
    added = _added(match)
    operands = [*_operands(match), *added]
    for value in operands:
        reason = why_masked(match.program, value)
        if reason is not None:
            return reason
    return _why_not_before_softmax(match, added or operands)


def why_masked(program: Program, value: fx.Node) -> str | None:
    """Reason why a tensor may hold a mask: the node where the far number enters."""
    for step in _back(value):
        number = _far_number(program, step.node)
        if number is not None:
            return f"{value.name} may hold a mask: {number} comes in at {program.describe(step.node)}"
    return None


@dataclass(frozen=True, slots=True)
class _Step:
    node: fx.Node
    is_added: bool
    """True if there is an addition between the start of the search and the node."""


def _operands(match: Match) -> Iterator[fx.Node]:
    """The tensors a match reads as activations."""
    for name, role in match.rule.roles.items():
        if name == "out" or role.startswith("weight"):
            continue
        bound = match.bindings.get(name)
        for value in bound if isinstance(bound, tuple) else (bound,):
            if isinstance(value, fx.Node):
                yield value


def _added(match: Match) -> list[fx.Node]:
    """Addends of matmuls before a softmax: anywhere else an addend is a bias, which may have any magnitude."""
    products = [node for node in match.nodes if target_name(node.target) in ADDING]
    if not products or _softmax_after(match.root) is None:
        return []
    return [node.args[0] for node in products if isinstance(node.args[0], fx.Node)]


def _back(value: fx.Node) -> Iterator[_Step]:
    """A tensor and its sources, through ops that propagate a mask."""
    layer = [_Step(value, False)]
    seen = {value}
    for _ in range(MAX_STEPS):
        following: list[_Step] = []
        for step in layer:
            yield step
            if step.node.op != "call_function" or not _hands_on(step.node.target):
                continue
            is_added = step.is_added or _adds(step.node.target)
            for source in _handed_on(step.node):
                if source not in seen and len(seen) < MAX_NODES:
                    seen.add(source)
                    following.append(_Step(source, is_added))
        layer = following


def _handed_on(node: fx.Node) -> list[fx.Node]:
    """The operands that a result may be a mask by. The factors of a product are none."""
    is_product = target_name(node.target) in ADDING
    return [source for source in node.all_input_nodes if not is_product or source is node.args[0]]


@cache
def _hands_on(target: Any) -> bool:
    known = BY_TARGET.get(target)
    return (known is not None and Trait.PRESERVES_VALUES in known.traits) or target_name(target) in THROUGH | ADDING


@cache
def _fills(target: Any) -> bool:
    return target_name(target) in FILLS


@cache
def _adds(target: Any) -> bool:
    return target_name(target) in SUMS | ADDING


@cache
def _is_softmax(target: Any) -> bool:
    return target_name(target) in SOFTMAX


def _far_number(program: Program, node: fx.Node) -> str | None:
    if node.op == "get_attr":
        tensor = program.tensor(node)
        return _far_value(tensor) if tensor is not None else None
    if node.op != "call_function" or not _fills(node.target):
        return None
    return next((repr(number) for number in (*node.args, *node.kwargs.values()) if _is_far(number)), None)


def _far_value(tensor: torch.Tensor) -> str | None:
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() == 0:
        return None
    low, high = (float(end) for end in torch.aminmax(tensor.detach()))
    return next((repr(end) for end in (low, high) if _is_far(end)), None)


def _is_far(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.fabs(value) < FAR


def _why_not_before_softmax(match: Match, operands: list[fx.Node]) -> str | None:
    """An addend to softmax scores that comes from the caller is a mask, though its values are unknown."""
    is_softmax = _is_softmax(match.root.target)
    if not is_softmax and not any(_adds(node.target) for node in match.nodes):
        return None
    softmax = match.root if is_softmax else _softmax_after(match.root)
    if softmax is None:
        return None
    for value in operands:
        for step in _back(value):
            if step.node.op == "placeholder" and (step.is_added or not is_softmax) and _is_float(step.node):
                return f"{step.node.name}, an input of the program, is added before {softmax.name} and may be a mask"
    return None


def _is_float(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is None or dtype.is_floating_point


def _softmax_after(node: fx.Node) -> fx.Node | None:
    layer = [node]
    for _ in range(MAX_STEPS // 2):
        readers = dict.fromkeys(user for source in layer for user in islice(source.users, MAX_READERS))
        found = next((reader for reader in readers if _is_softmax(reader.target)), None)
        if found is not None:
            return found
        layer = [reader for reader in islice(readers, MAX_NODES) if _hands_on(reader.target)]
    return None
