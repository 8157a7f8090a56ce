"""Choice of ops whose own grids lose more than leaving them float costs.

All light ops are left float; then one after the other computes on its grid again, the one that does least harm for its time
first, as long as the whole stays close to the best. Grids of neighbours hide each other: an op alone that is left float may
gain nothing, as the next one rounds what it yields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantc.calibration.observed_tensors import same_elements
from quantc.config.resolve import resolve
from quantc.config.selectors import ByAll
from quantc.ir.decisions import Float
from quantc.ir.judgment import Judgment
from quantc.ir.mac_count import example_sizes, products
from quantc.ir.plan import Part
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import tensor_type
from quantc.recover.simulation import Left, Simulation
from quantc.spec.formats import Timing

SLACK = 0.5
"""Decibels that may be given up against leaving all light ops float."""
Batch = Sequence[Any]
"""Flat inputs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A match that may be left float."""

    root: str
    nodes: tuple[fx.Node, ...]
    elements: float
    """Share of the elements that quantized ops yield."""
    macs: float
    """Share of the multiply-adds."""

    @property
    def time(self) -> float:
        return max(self.elements + self.macs, 1e-9)


@dataclass(frozen=True, slots=True)
class Limits:
    """What leaving ops float must gain, and may cost."""

    gain: float
    elements: float
    macs: float


@dataclass(frozen=True, slots=True)
class Data:
    """Batches, and the float program's outputs for them."""

    batches: tuple[Batch, ...]
    expected: tuple[Any, ...]

    @staticmethod
    def of(simulation: Simulation, batches: Sequence[Batch]) -> Data:
        return Data(tuple(batches), tuple(simulation.run(leaves) for leaves in batches))

    def first(self) -> Data:
        """The first batch alone."""
        return Data(self.batches[:1], self.expected[:1])


@dataclass(frozen=True, slots=True)
class Choice:
    """The matches to leave float, and what became of each candidate that seemed worth it."""

    left: tuple[Candidate, ...]
    judgments: tuple[Judgment, ...]
    notes: tuple[str, ...] = ()


def candidates(program: Program, macs: float) -> list[Candidate]:
    """The matches that are no large part of the multiply-adds, whose results were observed one by one, and which no rule
    of the config asks for."""
    kept = _shared(program) | _asked_for(program)
    members: dict[str, list[fx.Node]] = {}
    for node, claim in program.plan.claims.rows.items():
        if claim.part is Part.QUANTIZED and claim.timing is Timing.STATIC and node.graph is program.graph:
            members.setdefault(claim.root, []).append(node)
    sizes = example_sizes(program)
    work = {root: _work(nodes, sizes) for root, nodes in members.items()}
    every_mac = sum(count for count, _ in work.values()) or 1.0
    every_element = sum(count for _, count in work.values()) or 1.0
    found = [
        Candidate(root, tuple(nodes), work[root][1] / every_element, work[root][0] / every_mac)
        for root, nodes in members.items()
        if kept.isdisjoint(nodes)
    ]
    return [each for each in found if each.macs <= macs]


def _shared(program: Program) -> set[fx.Node]:
    """Nodes that yield tensors which were observed together: without one of them, nothing is known of the others."""
    places = Places(program)
    found: set[fx.Node] = set()
    for group in program.plan.groups:
        nodes = [node for site in group.values if (node := places.node(site)).op != "get_attr"]
        if len({same_elements(node) for node in nodes}) > 1:
            found.update(nodes)
    return found


def _asked_for(program: Program) -> set[fx.Node]:
    """Nodes that a rule of the config quantizes; one for everything asks for none in particular."""
    config = program.plan.config
    if config is None:
        return set()
    found = resolve(config.rules, program, must_match=False)
    said = [(node, setting) for node, roles in found.nodes.items() for setting in roles.values()]
    said += [(consumer, setting) for (_, consumer), setting in found.edges.items()]
    return {node for node, one in said if not isinstance(one.use, Float) and not isinstance(one.rule.select, ByAll)}


def _work(nodes: Sequence[fx.Node], sizes: Mapping[str, int]) -> tuple[float, float]:
    """Multiply-adds and elements of a match. Infinite where unknown: such a match is no light one."""
    macs = 0.0
    for node in nodes:
        rows = products(node, sizes)
        macs += math.inf if rows is None else sum(row.count for row in rows)
    kind = tensor_type(nodes[-1])
    shape = () if kind is None else kind.shape
    known = [size if isinstance(size, int) else evaluate(size, sizes) for size in shape]
    return macs, float(math.prod(size for size in known if size is not None))


def choose(
    simulation: Simulation, limits: Limits, fit: Data, judge: Data, tell: Callable[[str], None] | None = None
) -> Choice:
    """Choose on some batches, and judge on others."""

    def error(data: Data, left: Sequence[Candidate]) -> float:
        return simulation.error(data.batches, data.expected, Left(frozenset(each.root for each in left)))

    every = candidates(simulation.program, limits.macs)
    before, least = error(fit, ()), error(fit, every)
    if not every or not _gains(before, least, limits.gain):
        told = f"no gain of {limits.gain:g} dB: {_decibels(before)} dB as it is, {_decibels(least)} dB with {len(every)} light ops float"
        return Choice((), (), (told,))
    harm: dict[str, float] = {}
    for each in every:
        if tell is not None:
            tell(each.root)
        harm[each.root] = error(fit.first(), [other for other in every if other is not each])
    best = min(harm.values())
    order = sorted(every, key=lambda each: (harm[each.root] - best) / each.time)
    left = order[_most_quantized(lambda count: error(fit, order[count:]), len(order), least * 10 ** (SLACK / 10)) :]
    if not _affordable(left, limits):
        left = _within(left, limits)
    if not left:
        told = f"what gains most is more than {limits.elements:.0%} of the elements, or {limits.macs:.0%} of the multiply-adds"
        return Choice((), (), (told,))
    return _judged(left, lambda chosen: error(judge, chosen), simulation.program, limits)


def _most_quantized(error: Callable[[int], float], most: int, limit: float) -> int:
    """The largest number of the first ops that may be quantized, by bisection."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if error(middle) <= limit else (low, middle - 1)
    return low


def _within(left: Sequence[Candidate], limits: Limits) -> list[Candidate]:
    """The most harmful for their time, as far as the limits allow."""
    found: list[Candidate] = []
    for each in reversed(left):
        if _affordable([*found, each], limits):
            found.append(each)
    return found


def _affordable(left: Sequence[Candidate], limits: Limits) -> bool:
    return sum(each.elements for each in left) <= limits.elements and sum(each.macs for each in left) <= limits.macs


def _judged(
    left: Sequence[Candidate], error: Callable[[Sequence[Candidate]], float], program: Program, limits: Limits
) -> Choice:
    """Keep those without which the other batches have a larger error."""
    before, after = error(()), error(left)
    if not _gains(before, after, limits.gain):
        reason = f"it gains less than {limits.gain:g} dB on the batches that it was not chosen on"
        return Choice((), tuple(Judgment(_name(program, each), "undone", before, after, reason) for each in left))
    kept, judgments = list(left), []
    for each in left:
        without = error([other for other in kept if other is not each])
        reason = f"{each.elements:.1%} of the elements{f', {each.macs:.1%} of the multiply-adds' if each.macs else ''}"
        if without <= after:
            kept.remove(each)
            judgments.append(Judgment(_name(program, each), "undone", without, after, "no better on other batches"))
            after = without
        else:
            judgments.append(Judgment(_name(program, each), "kept", without, after, f"left float: {reason}"))
    share = sum(each.elements for each in kept)
    note = f"{len(kept)} ops left float, {share:.1%} of the elements: {_decibels(before)} -> {_decibels(after)} dB on other batches"
    return Choice(tuple(kept), tuple(judgments), (note,))


def _name(program: Program, candidate: Candidate) -> str:
    return program.describe(candidate.nodes[-1])


def _gains(before: float, after: float, gain: float) -> bool:
    return after <= before * 10 ** (-gain / 10) and before > 0


def _decibels(error: float) -> str:
    return f"{-10 * math.log10(error):.1f}" if error > 0 else "inf"
