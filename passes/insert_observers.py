"""Insertion of observers into the graph, for programs that run outside `qc.calibrate`."""

from __future__ import annotations

from typing import ClassVar

from torch import fx, nn

from quantc.calibration.graph_observers import HOLDER, redirect
from quantc.calibration.observed_tensors import data_groups, observed_tensors
from quantc.ir.plan import Group
from quantc.ir.program import Program, Stage
from quantc.ir.site_index import after
from quantc.observe.module import ObserverModule, behind, observer_nodes
from quantc.observe.observation_registry import start
from quantc.pipeline.pipeline import Outcome, Pass, Preserves


class InsertObservers(Pass):
    """Insert an observer after every tensor whose range calibration has to find.

    An observer is an identity module. All observers of a sharing group share one observation, so running
    `prepared.module` on data calibrates the program: in your own loop, inside another model, or during training.
    `qc.convert` reads the statistics and removes the observers. `qc.calibrate` does not need them, works with and
    without, and gives the same numbers.

    A copy of the module has observers of its own. While torch exports or compiles the module, observers are the
    identity, and the result has none. `quantc.observe.observers_off(module)` disables them temporarily. Inside the
    graphs of higher-order ops they see data only under `torch.no_grad()`.
    """

    name: ClassVar[str] = "insert-observers"
    needs: ClassVar[Stage] = Stage.SHARED
    gives: ClassVar[Stage | None] = Stage.OBSERVED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        observers = observer_nodes(program)
        present = {(behind(node, observers), module.group) for node, module in observers.items()}
        statistics = program.plan.statistics
        for group, spec in data_groups(program):
            statistics.setdefault(group.name, start(spec))
        wanted = {
            node: missing
            for node, groups in observed_tensors(program).items()
            if (missing := [group for group in groups if (node, group.name) not in present])
        }
        readers = dict.fromkeys(user for node in wanted for user in node.users)
        redirect(program, {node: _observe(program, node, groups) for node, groups in wanted.items()}, readers)
        count = sum(len(groups) for groups in wanted.values())
        return Outcome(count > 0, (f"{count} observers",) if count else ())


def _observe(program: Program, node: fx.Node, groups: list[Group]) -> fx.Node:
    """Observers behind a node, one for each group; gives the last of them."""
    holder = _holder(program.owner(node.graph))
    before = after(node)
    value = node
    for group in groups:
        name = f"n{len(holder._modules)}"
        observation = program.plan.statistics[group.name]
        holder.add_module(name, ObserverModule(group.name, observation, program.describe(node)))
        value = program.emit(f"{HOLDER}.{name}", (value,), before=before, like=node, name=f"observe_{node.name}")
    return value


def _holder(owner: nn.Module) -> nn.Module:
    """The submodule that holds the observers of a graph, made if absent."""
    if HOLDER not in owner._modules:
        owner.add_module(HOLDER, nn.Module())
    return owner.get_submodule(HOLDER)
