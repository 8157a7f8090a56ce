"""Selection of observed tensors, by group.

Calibration and the pass `insert-observers` both use it, so that they see the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator

from torch import fx

from quantc.ir.decisions import Quantize
from quantc.ir.dialect import is_op, row_of, traits_of
from quantc.ir.op_row import Family, Trait
from quantc.ir.plan import Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.module import behind, observer_nodes
from quantc.spec.formats import PerTensor
from quantc.spec.spec import QuantSpec
from quantc.text.literals import used_nodes


def data_groups(program: Program) -> Iterator[tuple[Group, QuantSpec]]:
    """Groups whose ranges come from calibration, with their specs."""
    for group in program.plan.groups:
        if group.source is Source.DATA and isinstance(group.outcome, Quantize):
            yield group, group.outcome.spec


def observed_tensors(program: Program) -> dict[fx.Node, tuple[Group, ...]]:
    """Nodes whose values are observed, in the order of the groups, and the groups each is observed for.

    Constants are not included: their range is read when qparams are computed. Nor are results of ops that only
    propagate tensors of the same group, such as reshape, cat and max_pool: each element counts once, where it is
    computed.
    """
    places = Places(program)
    observers = observer_nodes(program)
    found: dict[fx.Node, tuple[Group, ...]] = {}
    for group, spec in data_groups(program):
        values = dict.fromkeys(places.node(site) for site in group.values)
        is_whole = isinstance(spec.granularity, PerTensor)
        for node in values:
            if node.op == "get_attr" or (is_whole and _hands_on(node, values, observers)):
                continue
            found[node] = (*found.get(node, ()), group)
    return found


def _hands_on(node: fx.Node, values: Container[fx.Node], observers: Container[fx.Node]) -> bool:
    """True if every element of a tensor is an element of others in the group."""
    op = node.args[0] if node.target is operator.getitem else node
    if not isinstance(op, fx.Node) or Trait.PRESERVES_VALUES not in traits_of(op) or is_op(op, "pad"):
        return False  # padding may bring in a number of its own
    sources = [behind(source, observers) for source in used_nodes(op.args[0])]
    return all(source in values and source.op != "get_attr" for source in sources)


def same_elements(node: fx.Node) -> fx.Node:
    """The tensor that a node has the elements of, all of them and each once, through views, permutations and copies."""
    while (row := row_of(node)) is not None and row.family in (Family.VIEW, Family.PERMUTE, Family.COPY):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def observed_sites(program: Program) -> dict[str, list[str]]:
    """Observed tensors of each calibrated group."""
    places = Places(program)
    sites: dict[str, list[str]] = {group.name: [] for group, _ in data_groups(program)}
    for node, groups in observed_tensors(program).items():
        for group in groups:
            sites[group.name].append(str(places.out(node)))
    return sites
