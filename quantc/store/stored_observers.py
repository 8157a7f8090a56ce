"""Observers in a graph as data: what a text, which writes a call of a module, does not say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import BaseModel, ConfigDict
from torch import fx

from quantc.errors import LoadError
from quantc.ir.plan import Plan
from quantc.ir.program import Program, attribute
from quantc.observe.module import ObserverModule, observer_nodes
from quantc.store.file_versions import ADVICE
from quantc.text.node_printer import OpaqueModule


class ObserverData(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    group: str
    where: str
    enabled: bool


def observer_data(program: Program, names: Mapping[fx.Node, str]) -> dict[str, ObserverData]:
    """Observers of a program, by the names of the nodes that call them."""
    return {
        names[node]: ObserverData(group=module.group, where=module.where, enabled=module.enabled)
        for node, module in observer_nodes(program).items()
    }


def with_observed(program: Program) -> Plan:
    """The plan with the observers' current statistics."""
    seen = {module.group: module.observation for module in observer_nodes(program).values()}
    return replace(program.plan, statistics={**program.plan.statistics, **seen})


def put_observers(program: Program, data: Mapping[str, ObserverData], nodes: Mapping[str, fx.Node]) -> None:
    """Create observers where the text names modules."""
    for name, row in data.items():
        where = f"observers.{name[:60]}"
        node, observation = nodes.get(name), program.plan.statistics.get(row.group)
        if node is None or node.op != "call_module":
            raise LoadError("no node calls this observer", where=where, advice=ADVICE)
        if observation is None:
            raise LoadError(f"no statistics of the group {row.group[:60]!r}", where=where, advice=ADVICE)
        parent, _, leaf = str(node.target).rpartition(".")
        holder = program.owner(node.graph).get_submodule(parent)
        if not isinstance(attribute(holder, leaf), OpaqueModule):
            raise LoadError(f"two nodes call the observer {node.target!r}", where=where, advice=ADVICE)
        observer = ObserverModule(row.group, observation, row.where).train(program.training)
        observer.enabled = row.enabled
        setattr(holder, leaf, observer)
