"""Parts of programs as programs of their own: `Program.slice` and `Program.partition`.

A part has the values it reads from outside as inputs, under their names, so that decisions about them still apply; its
outputs are the values read outside it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import PipelineError, UnknownNameError, suggest
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.ir.signature import Input, Signature
from quantc.ir.sites import Site
from quantc.ir.types import TensorType, tensor_type
from quantc.rewrite.constant_order import forget_unread
from quantc.text.node_facts import nodes_between

REGION = "region"
"""Regions are named `region_0`, `region_1`, …"""

Part = str | fx.Node | Iterable[fx.Node | str]
"""A module by its path, a range of nodes, `first..last`, a node, or nodes or their names."""


class RegionModule(nn.Module):
    """A region as the host calls it. `run`, the region's program at first, may be replaced by what executes it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.run: Callable[..., Any] = program

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


@dataclass(frozen=True, eq=False)
class Region:
    """A convex part of a program: no path leaves it and comes back."""

    name: str
    program: Program

    @property
    def inputs(self) -> dict[str, TensorType | None]:
        """Types of the values it reads, by name."""
        return {item.name: item.type for item in self.program.signature.inputs}

    @property
    def outputs(self) -> dict[str, TensorType | None]:
        """Types of the values it yields, by name."""
        return {node.name: tensor_type(node) for node in _results(self.program.graph)}


@dataclass(frozen=True, eq=False)
class Partition:
    """A program in parts: regions, and the host, which computes the rest and calls them."""

    host: Program
    regions: tuple[Region, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.host(*args, **kwargs)

    def run_with(self, run: Callable[[Region], Callable[..., Any]]) -> None:
        """Have every region executed by what `run` gives for it: a function of its inputs, which gives its output, or a
        tuple of them."""
        for region in self.regions:
            module: Any = self.host.root.get_submodule(region.name)
            module.run = run(region)
        self.host.touch()


def slice_program(program: Program, part: Part) -> Program:
    """A part of the top graph as a program, on copies of its tensors."""
    chosen = _with_items(_nodes(program, part))
    twin = program.draft()
    inside = [twin.node(node.name) for node in program.graph.nodes if node in chosen]
    _keep_alone(twin, inside)
    return twin


def partition_program(program: Program, claimed: Callable[[fx.Node], bool] | Part | None = None) -> Partition:
    """The program with its claimed nodes in regions; by default those that a quantizer has claimed."""
    taken = _select_calls(program, claimed)
    groups = _groups(program.graph, taken)
    regions = tuple(Region(f"{REGION}_{index}", slice_program(program, group)) for index, group in enumerate(groups))
    host = program.draft()
    values = {node.name: node for node in host.graph.nodes}
    for region, group in zip(regions, groups, strict=True):
        values |= _call_region(host, region, [values[node.name] for node in group], values)
    forget_unread(host)
    return Partition(host, regions)


def _select_calls(program: Program, claimed: Callable[[fx.Node], bool] | Part | None) -> set[fx.Node]:
    calls = [node for node in program.graph.nodes if node.op.startswith("call_")]
    if claimed is None:
        found = {node for node in calls if program.plan.claims.get(node) is not None}
    elif callable(claimed):
        found = {node for node in calls if claimed(node)}
    else:
        found = {node for node in _nodes(program, claimed) if node.op.startswith("call_")}
    return _with_items(found)


def _nodes(program: Program, part: Part) -> set[fx.Node]:
    """Nodes of the top graph that a part names."""
    if isinstance(part, fx.Node):
        part = (part,)
    if isinstance(part, str):
        first, dots, last = part.partition("..")
        inside = list(nodes_between(program, first, last)) if dots else program.module_nodes(part) if part else []
        if not inside:
            known = {path for origin in program.origins.rows.values() if (path := origin.module_path)}
            raise UnknownNameError(
                f"unknown module {part!r}", where=program.name, advice=suggest(part, sorted(known), noun="modules")
            )
        given: list[fx.Node] = [node for node in inside if node.graph is program.graph]
    elif not isinstance(part, Iterable):
        raise PipelineError(f"{part!r} is no part of {program.name}", advice="name a module, a range or nodes")
    else:
        given = [program.node(item) if isinstance(item, str) else item for item in part]
    strange = next((node for node in given if node.graph is not program.graph), None)
    if strange is not None:
        raise PipelineError(
            f"{strange.name} is not in the top graph of {program.name}",
            advice="give nodes of this program; a nested graph goes with the op that calls it",
        )
    found = {node for node in given if node.op not in ("placeholder", "output", "get_attr")}
    if not found:
        raise PipelineError(f"the part of {program.name} has no ops", advice="name nodes that compute something")
    return found


def _with_items(nodes: set[fx.Node]) -> set[fx.Node]:
    """With the getitem nodes of those that yield several values, and no other ones: tuples cross no boundary."""
    whole = {node for node in nodes if node.target is not operator.getitem}
    return whole | {user for node in whole for user in node.users if user.target is operator.getitem}


def _keep_alone(program: Program, inside: Sequence[fx.Node]) -> None:
    """Make nodes of the top graph all there is of a program."""
    graph, own = program.graph, set(inside)
    read = dict.fromkeys(item for node in inside for item in node.all_input_nodes if item not in own)
    inputs = [node for node in graph.nodes if node in read and node.op != "get_attr"]
    results = [node for node in inside if any(user not in own for user in node.users) or not node.users]
    first = next(iter(graph.nodes))
    entries: list[fx.Node] = []
    for source in inputs:
        name = source.name
        if source.op != "placeholder":
            with graph.inserting_before(first):
                entry = graph.placeholder(f"{name}_in")
            entry.meta = dict(source.meta)
            source.replace_all_uses_with(entry, delete_user_cb=lambda user: user in own)
            source.name, entry.name = entry.name, name  # decisions about it are by name
            if (origin := program.origins.get(source)) is not None:
                program.origins[entry] = origin
        else:
            entry = source
        entries.append(entry)
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(results),)
    kept = {*own, *entries, output}
    for node in reversed(list(graph.nodes)):
        if node not in kept and node.op != "get_attr":
            program.erase(node)
    for entry in reversed(entries):
        next(iter(graph.nodes)).prepend(entry)
    program.signature = _signature(program.signature, entries, len(results))
    program.example_inputs = None
    program.plan = _plan_of(program)
    forget_unread(program)
    program.touch()


def _signature(whole: Signature, entries: Sequence[fx.Node], results: int) -> Signature:
    inputs = tuple(Input(node.name, tensor_type(node)) for node in entries)
    in_spec = pytree.tree_structure((tuple(range(len(entries))), {}))
    out_spec = pytree.tree_structure(0 if results == 1 else tuple(range(results)))
    return Signature(inputs, in_spec, out_spec, dict(whole.ranges), whole.opened)


def _plan_of(program: Program) -> Plan:
    """The decisions about what is left."""
    plan, names = program.plan, {node.name for node in program.graph.nodes}
    nested = {path for path, _ in program.graphs() if path}

    def is_here(site: Site) -> bool:
        return site.node in names if not site.graph else site.graph in nested

    groups = [
        replace(
            group,
            values=tuple(site for site in group.values if is_here(site)),
            places=tuple(site for site in group.places if is_here(site)),
        )
        for group in plan.groups
    ]
    kept = tuple(group for group in groups if group.places)
    known = {group.name for group in kept}
    return replace(
        plan,
        outcomes={site: outcome for site, outcome in plan.outcomes.items() if is_here(site)},
        groups=kept,
        statistics={name: found for name, found in plan.statistics.items() if name in known},
        qparams={name: found for name, found in plan.qparams.items() if name in known},
    )


# -- regions ---------------------------------------------------------------------------------------------------------


def _groups(graph: fx.Graph, taken: set[fx.Node]) -> list[list[fx.Node]]:
    """Taken nodes in convex groups, as large as they can be, each connected.

    The level of a node counts how often a path to it enters the taken nodes. No path between two taken nodes of one
    level leaves them, since it would have to come back on a higher one.
    """
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = [level[item] + (node in taken and item not in taken) for item in node.all_input_nodes]
        level[node] = max(before, default=int(node in taken))
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node not in taken:
            continue
        near = [item for item in node.all_input_nodes if item in taken and level[item] == level[node]]
        joined = {id(group[item]): group[item] for item in near}
        whole = [*(member for part in joined.values() for member in part), node]
        for member in whole:
            group[member] = whole
    order = {node: index for index, node in enumerate(graph.nodes)}
    found = {id(part): sorted(part, key=order.__getitem__) for part in group.values()}
    return sorted(found.values(), key=lambda part: order[part[0]])


def _call_region(
    host: Program, region: Region, nodes: Sequence[fx.Node], values: Mapping[str, fx.Node]
) -> dict[str, fx.Node]:
    """Replace nodes by a call of their region; its results, by the names of those that had them."""
    graph, own = host.graph, set(nodes)
    outputs = [node for node in nodes if any(user not in own for user in node.users) or not node.users]
    host.root.add_module(region.name, RegionModule(region.program))
    args = tuple(values[name] for name in region.inputs)
    found: dict[str, fx.Node] = {}
    call = host.emit(region.name, args, before=nodes[-1], name=region.name)
    call.meta.pop("val", None)
    for index, node in enumerate(outputs):
        value: fx.Node = call
        if len(outputs) > 1:
            value = host.emit(operator.getitem, (call, index), before=nodes[-1], like=node)
        else:
            value.meta["val"] = node.meta.get("val")
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in own)
        found[node.name] = value
    for node in reversed(nodes):
        host.erase(node)
    _sort(graph)
    host.touch()
    return found


def _sort(graph: fx.Graph) -> None:
    """Bring nodes into an order in which each comes after those it reads, and otherwise stays."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    waits = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(order[node], node) for node in graph.nodes if not waits[node]]
    heapify(ready)
    done: list[fx.Node] = []
    while ready:
        _, node = heappop(ready)
        done.append(node)
        for user in node.users:
            waits[user] -= 1
            if not waits[user]:
                heappush(ready, (order[user], user))
    for before, node in pairwise(done):
        before.append(node)


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return list(output.all_input_nodes)
