"""Observers in a graph: reading them, initializing them from the plan, and removing them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from torch import fx

from quantc.ir.program import Program, Stage
from quantc.ir.site_index import operand_nodes, rewire
from quantc.observe.module import behind, observer_nodes, observers_in
from quantc.spec.observation import Observation

HOLDER = "_observers"
"""The submodule that holds the observers of a graph."""


def read_observers(program: Program) -> bool:
    """Store the statistics of a program's observers in its plan; True if they have seen anything."""
    has_seen = False
    for observer in observers_in(program.root):
        program.plan.statistics[observer.group] = observer.observation
        has_seen = has_seen or observer.observation.seen > 0
    if has_seen:
        program.stage = max(program.stage, Stage.CALIBRATED)
    return has_seen


def show_observers(program: Program) -> None:
    """Initialize a program's observers from its plan, so that they continue from there."""
    copies: dict[str, Observation] = {}
    for observer in observers_in(program.root):
        known = program.plan.statistics.get(observer.group)
        if known is not None:
            # a copy: observers modify theirs in place, and the plan's may be shared
            if observer.group not in copies:
                copies[observer.group] = copy.deepcopy(known)
            observer.observation = copies[observer.group]


def redirect(program: Program, replaced: Mapping[fx.Node, fx.Node], readers: Iterable[fx.Node]) -> None:
    """Replace operands of readers by other nodes. Each reader is rewired once, however many of its operands change."""
    for reader in readers:
        operands = enumerate(operand_nodes(reader))
        rewire(program, reader, {place: replaced[node] for place, node in operands if node in replaced})


def remove_observers(program: Program) -> int:
    """Remove the observers from the graph; their number."""
    observers = observer_nodes(program)
    readers = dict.fromkeys(user for node in observers for user in node.users if user not in observers)
    redirect(program, {node: behind(node, observers) for node in observers}, readers)
    for node in reversed(observers):
        program.erase(node)
    for _, graph in program.graphs():
        program.owner(graph)._modules.pop(HOLDER, None)
    return len(observers)
