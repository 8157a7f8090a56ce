"""What each op costs the whole program: how much better it would be with the op's own grids left out.

A grid belongs to the op that makes the tensor, whoever asks for it: one that holds outliers badly is not blamed on the op
that reads it. Each op is left out in turn, and the others stay on their grids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from quantc.calibration.observed_tensors import same_elements
from quantc.errors import QuantcError
from quantc.inspect.lockstep import is_integer
from quantc.ir.mac_count import example_sizes, products
from quantc.ir.plan import Part, Source
from quantc.ir.program import Program
from quantc.ir.site_index import operand_nodes, outputs_of
from quantc.recover.simulation import Left, Simulation

LEAST, MOST = 4, 32
"""Number of ops that are left out in turn."""
WORK = 2e10
"""Multiply-adds that may take, beyond the least number of ops."""
AGREE = 0.05
"""Decibels by which the simulation may differ from the program."""


def costs(reference: Program, quantized: Program, leaves: Sequence[Any], sqnr: float) -> Mapping[str, float]:
    """Decibels that leaving an op's grids out gains on one batch, by the first node of the op: for those with the largest error
    of their own. Empty where the plan does not say all that the quantized program does."""
    plan = quantized.plan
    if is_integer(quantized) or not plan.qparams or not reference.plan.claims or not math.isfinite(sqnr):
        return {}
    if any(group.source is Source.RUN_TIME for group in plan.groups):
        return {}
    try:
        simulation = Simulation.with_qparams(reference, plan, plan.qparams)
    except QuantcError:  # the reference has other nodes
        return {}
    expected, errors = [simulation.run(leaves)], simulation.own_errors(leaves)
    whole = simulation.error([leaves], expected, Left())
    if whole <= 0 or abs(-10 * math.log10(whole) - sqnr) > AGREE:
        return {}
    tensors = _tensors(reference, simulation)
    worst = sorted(tensors, key=lambda name: -max((errors.get(node, 0.0) for node in tensors[name]), default=0.0))
    found = {}
    for name in worst[: _affordable(reference)]:
        left = simulation.error([leaves], expected, Left(tensors=tensors[name]))
        found[name] = 10 * math.log10(whole / left) if left > 0 else math.inf
    return found


def _tensors(program: Program, simulation: Simulation) -> dict[str, frozenset[fx.Node]]:
    """By the first node of each op: its results and their views, its constants, and the program's inputs that it reads. An op that
    is float counts if somebody reads its result rounded."""
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        views.setdefault(same_elements(node), []).append(node)
    rounded = {same_elements(operand_nodes(reader)[operand]) for reader, operand in simulation.uses}
    first: dict[str, str] = {}
    found: dict[str, set[fx.Node]] = {}
    for node in program.graph.nodes:
        claim = program.plan.claims.get(node)
        if (
            same_elements(node) is not node
            or not node.op.startswith("call_")
            or (claim is None and node not in rounded)
        ):
            continue
        is_part = claim is not None and claim.part is Part.QUANTIZED
        own = found.setdefault(
            first.setdefault(claim.root, node.name) if claim is not None and is_part else node.name, set()
        )
        own.update(each for output in (node, *outputs_of(node)) for each in views.get(output, [output]))
        given = (same_elements(operand) for operand in operand_nodes(node)) if is_part else ()
        own.update(each for source in given if source.op in ("get_attr", "placeholder") for each in views[source])
    return {name: frozenset(nodes) for name, nodes in found.items()}


def _affordable(program: Program) -> int:
    sizes = example_sizes(program)
    rows = [products(node, sizes) for node in program.graph.nodes if node.op == "call_function"]
    macs = sum(row.count for found in rows if found is not None for row in found)
    return int(max(LEAST, min(MOST, WORK / max(macs, 1))))
