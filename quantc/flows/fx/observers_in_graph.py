"""Putting the observers of QConfigs into a program's graph, asking them at the end, and taking them out again."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from quantc.calibration.graph_observers import redirect
from quantc.errors import CalibrationError
from quantc.flows.foreign_observers import ObservedBy, has_seen, inner
from quantc.flows.fx.assign_qconfigs import PREFIX, Choice, is_fixed, is_observer, reuses_input
from quantc.ir.decisions import Fixed, Quantize
from quantc.ir.plan import Claim, Group, Source
from quantc.ir.program import Program, Stage, attribute
from quantc.ir.site_index import Places, after
from quantc.observe.trained import Trained
from quantc.spec.formats import Role, Timing

OBSERVED = (Source.DATA, Source.GIVEN, Source.RUN_TIME)


@dataclass
class Makers:
    """Observer factories: a group's observer comes from the QConfig of the op that yields the tensor, or that reads it."""

    program: Program
    choice: Choice
    _first: dict[Claim, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._places = Places(self.program)
        for node, claim in sorted(self.program.plan.claims.rows.items()):
            self._first.setdefault(claim, node)

    def observer(self, group: Group) -> nn.Module:
        """A new observer for a group."""
        qconfig, is_weight = self._of(group)
        observer: nn.Module = (qconfig.weight if is_weight else qconfig.activation)()
        axis = getattr(group.outcome.spec.granularity, "axis", None) if isinstance(group.outcome, Quantize) else None
        if axis is not None and hasattr(inner(observer), "ch_axis"):
            for each in (observer, inner(observer)):
                each.ch_axis = axis  # that of the op, which knows where its channels lie
        return observer

    def _of(self, group: Group) -> tuple[Any, bool]:
        claims = self.program.plan.claims
        outputs = [site for site in group.places if site.operand is None]
        for site in (*outputs, *group.places):
            node = self._places.node(site)
            claim = claims.get(node)
            qconfig = self.choice[self._first[claim] if claim is not None and site.operand is None else node]
            if qconfig is None or reuses_input(qconfig):
                continue
            outcome = group.outcome
            if isinstance(outcome, Quantize) and outcome.spec.role is Role.WEIGHT:
                return qconfig, True
            if is_fixed(qconfig) and not isinstance(outcome, Fixed):
                continue
            return qconfig, False
        return self.choice.mapping.global_qconfig, False


def insert(program: Program, makers: Makers) -> dict[str, list[str]]:
    """Put an observer behind every tensor that is quantized; those of a group share one. Gives their names by group."""
    places = Places(program)
    wanted: dict[fx.Node, list[Group]] = {}
    for group in program.plan.groups:
        if group.source in OBSERVED:
            for value in dict.fromkeys(places.node(site) for site in group.values):
                if value.op != "get_attr":
                    wanted.setdefault(value, []).append(group)
    observers: dict[str, nn.Module] = {}
    names: dict[str, list[str]] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    readers = dict.fromkeys(user for node in wanted for user in node.users)
    pairs = [(node, group) for node in sorted(wanted) for group in wanted[node]]
    for count, (node, group) in enumerate(pairs):
        observer = observers.setdefault(group.name, observers.get(group.name) or makers.observer(group))
        name = f"{PREFIX}{count}"
        program.root.add_module(name, observer)
        names.setdefault(group.name, []).append(name)
        source = replaced.get(node, node)
        replaced[node] = program.emit(name, (source,), before=after(source), like=node, name=name)
    redirect(program, replaced, readers)
    program.stage = Stage.OBSERVED
    return names


def remove(program: Program) -> None:
    """Take the observers out of the graph again."""
    calls = [node for node in program.graph.find_nodes(op="call_module") if is_observer(node)]
    for node in calls:
        source = node.args[0]
        if isinstance(source, fx.Node):
            program.forward(node, source)
        program.root._modules.pop(str(node.target), None)


def read(program: Program, makers: Makers, names: dict[str, list[str]]) -> None:
    """Take what observers have found into the plan: for activations from data, for weights from the tensors."""
    places = Places(program)
    unseen: list[str] = []
    for group in program.plan.groups:
        if not isinstance(group.outcome, Quantize) or group.source not in (Source.DATA, Source.CONSTANTS):
            continue
        spec = group.outcome.spec
        if spec.timing is Timing.WEIGHT_ONLY:
            continue  # in formats of the engine's own: it finds their scales from the tensors
        known = [attribute(program.root, name) for name in names.get(group.name, ())]
        observer = copy.deepcopy(known[0]) if known else makers.observer(group)
        if known and not has_seen(observer):
            unseen.append(names[group.name][0])
            continue
        for site in group.values:
            node = places.node(site)
            constant = program.tensor(node)
            if constant is not None:
                observer(constant.detach())
        found = ObservedBy(observer, spec.granularity).qparams(spec, where=group.name)
        program.plan.statistics[group.name] = Trained(spec.granularity, found)
    if unseen:
        raise CalibrationError(
            f"{program.name} was not calibrated: {len(unseen)} observers have seen no data",
            where=", ".join(unseen[:8]),
            advice="call the prepared model on some batches of data before convert_fx, all parts of it",
        )
    program.stage = Stage.CALIBRATED
