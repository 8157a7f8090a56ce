"""Explanations: why an op is quantized or float, and the smallest change that would make a rule claim it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from quantc.annotate.config_requests import is_dynamic
from quantc.annotate.left_float import ops_of
from quantc.errors import QuantcError, UnknownNameError
from quantc.inspect.changes import Change
from quantc.inspect.coverage import Judge, Row, Verdict, check_prepared
from quantc.inspect.remedies import Remedies
from quantc.integer.library import op_of
from quantc.ir.decisions import Float
from quantc.ir.dialect import op_name, ops_in
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.site_index import operand_nodes
from quantc.passes.remove_fake_quantize import as_inference_has_it
from quantc.patterns.explain_match import Tried, resolve_node
from quantc.spec.formats import Timing

SHOWN = 6
"""Maximum number of ops of a module that are named."""


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    """Verdict on a node and its reasons. `change` is the smallest change that would let a rule claim it."""

    row: Row
    tried: tuple[Tried, ...]
    """Every rule that mentions the op: the one that took it first, then the nearest."""
    changes: tuple[Change[Any], ...]
    """Changes that would let a rule take it, the smallest first; one is enough for the reason it answers."""
    notes: tuple[str, ...] = ()
    """Further facts: the config rule it follows, its formula in integer form."""
    is_integer: bool = False
    """True if the program is in integer form: changes are for the prepared program to tell."""
    others: tuple[NodeExplanation, ...] = ()
    """The other ops of a requested module. This is its first float op, if there is one."""

    @property
    def verdict(self) -> Verdict:
        return self.row.verdict

    @property
    def reason(self) -> str:
        return self.row.reason

    @property
    def nearest(self) -> Tried | None:
        """The rule that claimed the node, or came nearest to it."""
        return next(iter(self.tried), None)

    @property
    def change(self) -> Change[Any] | None:
        return next(iter(self.changes), None)

    def to_data(self) -> dict[str, Any]:
        return {
            **self.row.to_data(),
            "nearest": None if self.nearest is None else self.nearest.rule,
            "constraint": None if self.nearest is None else self.nearest.to_data()["cause"],
            "tried": [row.to_data() for row in self.tried],
            "change": None if self.change is None else self.change.to_data(),
            "changes": [change.to_data() for change in self.changes],
            "notes": list(self.notes),
            **({"others": [other.to_data() for other in self.others]} if self.others else {}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return "\n".join([self._alone(), *(str(other) for other in self.others)])

    def _alone(self) -> str:
        lines = [str(self.row)]
        lines += [f"  {'✓' if tried.matched else '✗'} {tried}" for tried in self.tried]
        lines += [f"  {note}" for note in self.notes]
        if self.verdict is not Verdict.FLOAT or self.is_integer:
            return "\n".join(lines)
        if not self.changes:
            return "\n".join([*lines, "no single change to the program, the config or the backend would quantize it"])
        lines.append(f"smallest change: {self.changes[0]}")
        return "\n".join([*lines, *(f"  or: {change}" for change in self.changes[1:])])


def explain(program: Program, node: fx.Node | str) -> NodeExplanation:
    """Explain one op of a prepared program, or those of a module."""
    check_prepared(program)
    if program.is_live:
        name = node if isinstance(node, str) else node.name
        return explain(as_inference_has_it(program), name)
    judge = Judge(program)
    inside = _ops_at(judge.program, node) if isinstance(node, str) and node else []
    if not isinstance(node, str) or program.has_node(node) or not inside:
        found = resolve_node(program, node)
        path = next((path for path, graph in program.graphs() if graph is found.graph), "")
        asked = next((op for at, op in ops_of(judge.program) if at == path and op.name == found.name), None)
        if asked is None:
            raise _no_op(program, found)
        made = _explain(program, judge, path, asked)
        others = [op.name for _, op in inside if op is not asked]
        if others and asked not in [op for _, op in inside]:
            told = f"{node} is also a module, whose ops are others: {', '.join(others[:SHOWN])}"
            made = replace(made, notes=(*made.notes, told))
        return made
    rows = [_explain(program, judge, path, op) for path, op in inside]
    first = next((row for row in rows if row.verdict is Verdict.FLOAT), rows[0])
    return replace(first, others=tuple(row for row in rows if row is not first))


def folded_into(captured: Program, prepared: Program, name: str) -> UnknownNameError | None:
    """Error for a name that the captured program has and the prepared one no longer has; None if that is not the case."""
    if not name or prepared.has_node(name) or prepared.module_nodes(name):
        return None
    nodes = [captured.node(name)] if captured.has_node(name) else captured.module_nodes(name)
    gone = next((node for node in nodes if node.op.startswith("call_")), None)
    if gone is None:
        return None
    taker: fx.Node | None = gone
    while taker is not None and not prepared.has_node(taker.name):
        taker = next(iter(operand_nodes(taker)), None)
    if taker is None or not taker.op.startswith("call_"):
        return None
    is_norm = op_name(gone) in ops_in(Family.NORM)
    into = (
        f"folded into the weights of {taker.name}"
        if is_norm
        else f"left out: inference does without it after {taker.name}"
    )
    return UnknownNameError(
        f"{name} is {op_name(gone)}, and was {into}", where=captured.describe(gone), advice=f"ask for {taker.name}"
    )


def _ops_at(program: Program, path: str) -> list[tuple[str, fx.Node]]:
    """The ops of the module at a path, and of those inside it."""
    members = set(program.module_nodes(path))
    return [(at, op) for at, op in ops_of(program) if op in members]


def _explain(program: Program, judge: Judge, path: str, asked: fx.Node) -> NodeExplanation:
    row = judge.row(path, asked)
    if judge.is_integer:
        return NodeExplanation(row, (), (), tuple(_integer_notes(program, asked, row)), is_integer=True)
    twin = judge.twin(path, asked)
    tried = [tried for trial in judge.reasons.trials.tables for tried in trial.explain(twin).tried]
    if row.verdict is Verdict.FLOAT:
        # a rule that fits and is not fed has not taken the node
        tried = [replace(one, matched=False, reason=_reason_text(row, one)) if one.matched else one for one in tried]
        changes = Remedies(judge.reasons).for_node(twin)
    else:
        tried.sort(key=lambda one: not one.matched)
        changes = ()
    return NodeExplanation(row, tuple(tried), changes, tuple(_technique_notes(judge, twin, row)))


def _technique_notes(judge: Judge, node: fx.Node, row: Row) -> Iterator[str]:
    """Notes on an op's technique, or the requested one, unless it is plain static quantization."""
    setting = judge.reasons.trials.config.setting(node)
    if setting is not None and is_dynamic(setting):
        yield f"the config asks for run-time scales: {setting.rule}"
    elif row.technique == Timing.WEIGHT_ONLY and setting is not None and isinstance(setting.use, Float):
        yield f"only its weights are quantized, as the config says: {setting.rule}"
    elif row.technique == Timing.WEIGHT_ONLY:
        yield "it quantizes nothing but its weights"


def _integer_notes(program: Program, node: fx.Node, row: Row) -> Iterator[str]:
    """Formula of an op of the integer form, or where to find what would give it one."""
    if row.verdict is Verdict.FLOAT:
        yield f"what would have to change is for the prepared program to say: prepared.explain({row.node!r})"
        return
    op, stands_for = op_of(node.target), program.plan.lowered.get(node)
    if stands_for is not None:
        yield f"it has the value of {stands_for} of the Q/DQ form"
    if op is not None:
        yield op.formula


def _reason_text(row: Row, tried: Tried) -> str:
    return row.reason.removeprefix(f"{tried.rule}: ")


def _no_op(program: Program, node: fx.Node) -> QuantcError:
    around = [*node.users, *operand_nodes(node)]
    names = ", ".join(dict.fromkeys(other.name for other in around if other.op.startswith("call_"))) or "an op"
    return QuantcError(
        f"{node.name} is {op_name(node)}, and only ops that compute tensors are quantized or left float",
        where=program.describe(node),
        advice=f"ask for {names}",
    )
