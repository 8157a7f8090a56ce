"""Weight ranges for which no pair sum can overflow, fixed before training.

`convert` reduces ranges after calibration, where the current weights need it. After training that would change the
trained program; so here the whole range is such that it is never needed.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from quantc.annotate.quantizer import instruction_sets_of
from quantc.integer.proof.range_reduction import group_of_factor
from quantc.ir.decisions import Quantize
from quantc.ir.dialect import FACTORS, op_name
from quantc.ir.plan import Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.spec.formats import DType
from quantc.spec.instruction_sets import INSTRUCTION_SETS, PairSums
from quantc.spec.spec import QuantSpec


def narrow_weights(program: Program) -> list[str]:
    """Give the weights of convs and matmuls that add pairs a safe range in the plan; notes where."""
    places = Places(program)
    groups = {site: group for group in program.plan.groups for site in group.places}
    specs: dict[str, QuantSpec] = {}
    for node, sums in _adding(program):
        x, weight = (group_of_factor(places, groups, node, name) for name in FACTORS[op_name(node)])
        if x is None or weight is None or weight.source is not Source.CONSTANTS:
            continue
        limit = _largest_weight(_spec(x), sums)
        spec = specs.get(weight.name, _spec(weight))
        if spec is not None and limit is not None and max(-spec.qmin, spec.qmax) > limit:
            specs[weight.name] = spec.but(qmin=max(spec.qmin, -limit), qmax=min(spec.qmax, limit))
    program.plan.groups = tuple(
        replace(group, outcome=Quantize(specs[group.name])) if group.name in specs else group
        for group in program.plan.groups
    )
    ranges = sorted({f"{spec.qmin}..{spec.qmax}" for spec in specs.values()})
    return [f"{len(specs)} weights train in {', '.join(ranges)}: pairs of products fit 16 bits"] if specs else []


def _adding(program: Program) -> list[tuple[fx.Node, PairSums]]:
    """The convolutions and matmuls whose instruction set adds pairs in few bits."""
    targets = instruction_sets_of(program.plan.quantizer)
    found = []
    for node, claim in program.plan.claims.rows.items():
        instructions = INSTRUCTION_SETS.get(targets.get(claim.quantizer, ""))
        if op_name(node) in FACTORS and instructions is not None and instructions.pairs is not None:
            found.append((node, instructions.pairs))
    return found


def _spec(group: Group) -> QuantSpec | None:
    return group.outcome.spec if isinstance(group.outcome, Quantize) else None


def _largest_weight(x: QuantSpec | None, sums: PairSums) -> int | None:
    """The largest weight with which two products with any activations fit; None where they are no bytes."""
    if x is None or x.dtype not in (DType.INT8, DType.UINT8):
        return None
    low, high = sums.multiplied(x.qmin, x.qmax, x.dtype.is_signed)
    return int((2 ** (sums.bits - 1) - 1) // (2 * max(-low, high)))
