"""The ops of a program that were left float, with reasons: one line for each kind, or one for each op."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from quantc.annotate.float_view import float_view
from quantc.annotate.operand_forms import Forms
from quantc.annotate.reasons import Reasons
from quantc.ir.dialect import SYMBOLIC, is_op, op_name
from quantc.ir.mac_count import example_sizes, products
from quantc.ir.program import Program, Stage
from quantc.ir.types import ScalarType, type_of
from quantc.qdq.ops import belongs_to_qdq


def why_float(program: Program, most: int = 5) -> list[str]:
    """The reasons why ops of an annotated program were left float, one line for each kind of op, the most work
    first."""
    view, sizes = float_view(program), example_sizes(program)
    reasons = Reasons(view)
    by_op: dict[str, list[str]] = {}
    work: dict[str, int] = {}
    for path, node in ops_of(view):
        if node not in view.plan.claims:
            op = op_name(node)
            by_op.setdefault(op, []).append(f"{path}/{node.name}" if path else node.name)
            if len(by_op[op]) == 1:
                by_op[op].append(reasons(node).text)
            work[op] = work.get(op, 0) + sum(product.count for product in products(node, sizes) or ())
    kinds = sorted(by_op, key=lambda op: -work[op])
    shown = [_line(op, *by_op[op]) for op in kinds[:most]]
    return shown if len(kinds) <= most else [*shown, f"and {len(kinds) - most} other kinds of ops"]


def _line(op: str, first: str, reason: str, *others: str) -> str:
    return f"{first} ({f'one of {1 + len(others)} {op}' if others else op}): {reason}"


def why_not_quantized(program: Program) -> dict[fx.Node, str]:
    """The reason for each float op of a quantized program that no rule took."""
    forms, noted = Forms(program), program.plan.left_float
    places = [(path, node) for path, node in ops_of(program) if not forms.is_quantized(node)]
    if all(node in noted for _, node in places):
        return {node: noted[node] for _, node in places}
    view = float_view(program)
    twins = {(path, node.name): node for path, graph in view.graphs() for node in graph.nodes}
    reasons = Reasons(view)
    return {node: reasons(twins[path, node.name]).text for path, node in places}


def ops_of(program: Program) -> Iterator[tuple[str, fx.Node]]:
    """The nodes that compute tensors, with the path of their graph. Excludes sizes, items of tuples, Q/DQ ops and
    checks that yield nothing; a higher-order op is represented by the graphs it calls; and in integer form an op of
    several steps appears once."""
    plan = program.plan
    is_integer = program.stage >= Stage.LOWERED
    for path, graph in program.graphs():
        for node in graph.nodes:
            is_part = is_integer or isinstance(node.target, HigherOrderOperator)
            if _computes(node) and (not is_part or node in plan.left_float or node in plan.claims):
                yield path, node


def _computes(node: fx.Node) -> bool:
    if not node.op.startswith("call_") or belongs_to_qdq(node):
        return False
    target = node.target
    if target is operator.getitem or target in SYMBOLIC or is_op(node, "sym_size"):
        return False
    if isinstance(target, OpOverload) and not target._schema.returns:
        return False
    return not isinstance(type_of(node), ScalarType)
