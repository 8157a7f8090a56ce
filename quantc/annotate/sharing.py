"""Groups of sites that share a scale: connected components of tied sites, independent of the order of annotation.

Two sites are tied if one is declared to be like the other; if they are uses of one tensor with equal decisions; or if
one is a use of a tensor that its producer yields with an equal decision.
"""

from __future__ import annotations

from torch import fx

from quantc.errors import AnnotationError
from quantc.ir.decisions import Derived, Fixed, Quantize, SameAs, TensorOutcome
from quantc.ir.plan import Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.spec.formats import Timing
from quantc.support.equivalence import equivalence_classes, follow

Rooted = Quantize | Fixed | Derived


def resolve_groups(program: Program) -> tuple[Group, ...]:
    """The groups of a plan, in program order."""
    outcomes = program.plan.outcomes
    places = Places(program)
    roots = _roots(program)
    ties = [(site, outcome.site) for site, outcome in outcomes.items() if isinstance(outcome, SameAs)]
    values = {site: places.value(site) for site in roots}
    _refuse_rounded_before(program, places, roots, values)
    for site in _unread(program, places, roots, values):
        del roots[site]
    by_value: dict[tuple[fx.Node, Rooted], Site] = {}
    for site, root in roots.items():
        first = by_value.setdefault((values[site], root), site)
        if first != site:
            ties.append((first, site))
    order = _Order(places)
    components = (sorted(members, key=order) for members in equivalence_classes(roots, ties))
    groups = [_group(members, roots, values, places, order) for members in components]
    return tuple(sorted(groups, key=lambda group: order(group.places[0])))


def _roots(program: Program) -> dict[Site, Rooted]:
    """The decision of each site, with references followed. AnnotationError on a cycle, or a reference to a float
    site."""
    outcomes = program.plan.outcomes
    roots: dict[Site, Rooted] = {}
    for site, (end, outcome) in follow(outcomes, _target).items():
        if isinstance(outcome, Quantize | Fixed | Derived):
            roots[site] = outcome
        elif site != end:
            raise AnnotationError(
                f"{site} is to be quantized like {end}, which is float",
                where=f"{site}, {end}",
                advice="quantize that place too, or leave both float",
            )
    return {site: roots[site] for site in outcomes if site in roots}


def _refuse_rounded_before(
    program: Program, places: Places, roots: dict[Site, Rooted], values: dict[Site, fx.Node]
) -> None:
    """Raise AnnotationError if a site asks for more bits than the op before it propagates: the values are rounded
    already."""
    for site, root in roots.items():
        out = places.out(values[site])
        if site.operand is None or not isinstance(program.plan.outcomes.get(out), SameAs):
            continue
        given = roots.get(out)
        if not isinstance(root, Quantize) or not isinstance(given, Quantize):
            continue
        if not _is_finer(root, given):
            continue
        asked, rounded = root.spec.dtype, given.spec.dtype
        reader, value = places.node(site), values[site]
        raise AnnotationError(
            f"{reader.name} is to read {value.name} as {asked}, and {value.name} hands on what was rounded to {rounded}",
            where=f"{program.describe(reader)}, {program.describe(value)}",
            advice=f"ask for {asked} where the numbers of {value.name} come from too, or for {rounded} here",
        )


def _unread(program: Program, places: Places, roots: dict[Site, Rooted], values: dict[Site, fx.Node]) -> list[Site]:
    """The outputs whose quantization no consumer reads: all ask for more bits, and quantize the float value
    themselves."""
    liked = {outcome.site for outcome in program.plan.outcomes.values() if isinstance(outcome, SameAs)}
    found = []
    for site, root in roots.items():
        if site.operand is not None or site in liked or not isinstance(root, Quantize):
            continue
        uses = [roots.get(places.use(reader, operand)) for reader, operand in places.reads(values[site])]
        if uses and all(isinstance(use, Quantize) and _is_finer(use, root) for use in uses):
            found.append(site)
    return found


def _is_finer(asked: Quantize, given: Quantize) -> bool:
    formats = asked.spec.dtype, given.spec.dtype
    return not any(each.is_float for each in formats) and formats[0].bits > formats[1].bits


def _target(outcome: TensorOutcome) -> Site | None:
    return outcome.site if isinstance(outcome, SameAs) else None


class _Order:
    """Sort key for sites in program order: by graph, by node, operands before outputs."""

    def __init__(self, places: Places) -> None:
        self.at: dict[tuple[str, str], tuple[int, int]] = {}
        for number, (graph, path) in enumerate(places.paths.items()):
            for position, node in enumerate(graph.nodes):
                self.at[path, node.name] = (number, position)

    def __call__(self, site: Site) -> tuple[tuple[int, int], int, int]:
        is_output = site.operand is None
        return self.at[site.graph, site.node], int(is_output), (site.out or 0) if is_output else site.operand or 0


def _group(
    members: list[Site], roots: dict[Site, Rooted], values: dict[Site, fx.Node], places: Places, order: _Order
) -> Group:
    # tied sites have equal decisions, so any member represents the group
    outcome = roots[members[0]]
    made = dict.fromkeys(values[member] for member in members)
    sites = tuple(sorted((places.out(value) for value in made), key=order))
    return Group(str(members[0]), outcome, sites, tuple(members), _source(outcome, list(made)))


def _source(outcome: Rooted, values: list[fx.Node]) -> Source:
    if isinstance(outcome, Fixed):
        return Source.GIVEN
    if isinstance(outcome, Derived):
        return Source.DERIVED
    if outcome.spec.timing is Timing.DYNAMIC:
        return Source.RUN_TIME
    return Source.CONSTANTS if all(value.op == "get_attr" for value in values) else Source.DATA
