"""Checks every invariant of the IR and reports all faults at once.

One walk over the nodes, without visits to users, and lines are printed only for nodes at fault: a sound program of 100
000 nodes is checked in about a second.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload

from quantc.errors import VerifyError
from quantc.ir.dialect import may_alias
from quantc.ir.program import Program, Stage, attribute
from quantc.ir.subgraphs import why_not_nested
from quantc.ir.types import TupleType, type_of
from quantc.text.digests import Constants
from quantc.text.node_printer import GraphLines
from quantc.verify.pair_check import why_not_pair
from quantc.verify.schema_check import why_not_call
from quantc.verify.type_check import sample_sizes, why_not_constant_type, why_not_type


def verify(program: Program) -> None:
    """Raise one VerifyError that lists every fault, each with the line of its node."""
    faults = list(_Verifier(program).faults())
    if not faults:
        return
    raise VerifyError(
        f"{program.name} breaks {len(faults)} rule{'s' if len(faults) > 1 else ''} of the IR",
        faults,
        where=f"stage {program.stage.label}",
        advice="change programs only through emit, constant, replace and erase; see the first fault, others may follow from it",
    )


@dataclass
class _Verifier:
    program: Program
    members: set[fx.Node] = field(default_factory=set)
    cast: set[fx.Graph] = field(default_factory=set)
    """Graphs that run under autocast, where ops give other types than elsewhere."""

    def faults(self) -> Iterator[str]:
        constants: Constants | None = None
        for path, graph in list(self.program.graphs()):
            lines: GraphLines | None = None
            for node, what in self._graph(path, graph):
                constants = constants or Constants(self.program)
                lines = lines or GraphLines(self.program, path, graph, constants)
                yield _report(path, lines, node, what)
        yield from self._tables()

    def _note_cast(self, owner: nn.Module, graph: fx.Graph) -> None:
        """Note the graphs below this one that run under autocast. Outer graphs come first."""
        for node in graph.find_nodes(op="get_attr"):
            inner = getattr(attribute(owner, str(node.target)), "graph", None)
            is_cast = graph in self.cast or any(str(user.target) == "wrap_with_autocast" for user in node.users)
            if is_cast and isinstance(inner, fx.Graph):
                self.cast.add(inner)

    def _graph(self, path: str, graph: fx.Graph) -> Iterator[tuple[fx.Node | None, str]]:
        """Every fault of one graph, with its node."""
        owner = self.program.root if graph is self.program.graph else graph.owning_module
        if owner is None:
            yield None, "the graph has lost its module"
            return
        is_canonical = self.program.stage >= Stage.CANONICAL
        names: set[str] = set()
        defined: set[fx.Node] = set()
        self._note_cast(owner, graph)
        check = _NodeChecks(owner, sample_sizes(self.program.signature), graph not in self.cast)
        for node in graph.nodes:
            for what in check.node(node):
                yield node, what
            if node.graph is not graph:
                yield node, "the node belongs to another graph"
            if node.name in names:
                yield node, f"another node of this graph is also named {node.name!r}"
            if is_canonical and node.op == "call_method":
                yield (
                    node,
                    f"call_method {node.target!r} in a {self.program.stage.label} program; canonical programs have none",
                )
            for used in node.all_input_nodes:
                if used not in defined:
                    yield node, _why_undefined(used, graph)
            names.add(node.name)
            defined.add(node)
        self.members |= defined
        yield from _order(graph)
        if not path:
            yield from self._signature(graph)

    def _signature(self, graph: fx.Graph) -> Iterator[tuple[fx.Node | None, str]]:
        signature = self.program.signature
        placeholders = list(graph.find_nodes(op="placeholder"))
        if len(placeholders) != len(signature.inputs):
            yield None, f"the signature has {len(signature.inputs)} inputs, but the graph {len(placeholders)}"
        for node, given in zip(placeholders, signature.inputs, strict=False):
            actual = type_of(node)
            if given.type is not None and actual is not None and actual != given.type:
                yield node, f"the signature says that input {given.name!r} is {given.type}"
        if signature.in_spec.num_leaves != len(signature.inputs):
            yield None, f"in_spec arranges {signature.in_spec.num_leaves} inputs, not {len(signature.inputs)}"
        for node in graph.find_nodes(op="output"):
            value = node.args[0] if node.args else None
            if not isinstance(value, tuple | list):
                yield node, "the top graph gives a flat tuple of outputs"
            elif len(value) != signature.out_spec.num_leaves:
                yield node, f"out_spec arranges {signature.out_spec.num_leaves} outputs, not {len(value)}"

    def _tables(self) -> Iterator[str]:
        """Inconsistent rows of the side tables."""
        program = self.program
        for table, rows in (("origins", program.origins), ("modes", program.modes), ("counters", program.counters)):
            yield from (
                f"{table} has a row for {node.name!r}, which is not in the program"
                for node in rows
                if node not in self.members
            )
        for node, mode in program.modes.rows.items():
            if node in self.members and mode.position >= len(node.args):
                yield f"modes says that argument {mode.position} of {node.name!r} has a mode, but it has {len(node.args)}"
        for node, target in program.counters.rows.items():
            if node in self.members and attribute(program.owner(node.graph), target) is None:
                yield f"counters names {target!r} for {node.name!r}, but there is no such buffer"
        yield from self._placements()

    def _placements(self) -> Iterator[str]:
        """False claims in the tables of kernels."""
        placements = self.program.placements
        for name, table in (("runs", placements.runs), ("stand_ins", placements.stand_ins)):
            yield from (
                f"{name} has a row for {node.name!r}, which is not in the program"
                for node in table
                if node not in self.members
            )
        for node, keys in placements.runs.rows.items():
            for key in keys:
                if key not in placements.ops:
                    yield f"{node.name!r} runs {key!r}, of which there is no row"
        if placements.owns_results:
            yield from self._borrowed_results()

    def _borrowed_results(self) -> Iterator[str]:
        """Results that are constants or views of some, where all are said to be memory of their own."""
        constants: set[fx.Node] = set()
        for node in self.program.graph.nodes:
            is_view = node.op == "call_function" and may_alias(node.target)
            if node.op == "get_attr" or (is_view and not constants.isdisjoint(node.all_input_nodes)):
                constants.add(node)
            for result in node.all_input_nodes if node.op == "output" else ():
                if result in constants:
                    yield f"the result {result.name!r} is a constant or a view of one, and is said to be memory of its own"


def _report(path: str, lines: GraphLines, node: fx.Node | None, what: str) -> str:
    place = f"graph @{path}: " if path else ""
    return f"{place}{what}" if node is None else f"{place}{lines.line(node)}\n      {what}"


def _why_undefined(used: fx.Node, graph: fx.Graph) -> str:
    if used._erased:
        return f"it uses %{used.name}, which has been erased"
    if used.graph is not graph:
        return f"it uses %{used.name}, which belongs to another graph"
    return f"it uses %{used.name} before it is defined"


def _order(graph: fx.Graph) -> Iterator[tuple[fx.Node | None, str]]:
    """One output, last; inputs before all computation."""
    outputs = list(graph.find_nodes(op="output"))
    if not outputs:
        yield None, "the graph has no output"
    yield from ((node, "a graph has one output") for node in outputs[1:])
    last = next(iter(reversed(graph.nodes)), None)
    if outputs and last is not None and last.op != "output":
        yield last, "the node comes after the output"
    has_begun = False
    for node in graph.nodes:
        if node.op == "placeholder" and has_begun:
            yield node, "inputs come before all computation"
        has_begun = has_begun or node.op not in ("placeholder", "get_attr")


@dataclass
class _NodeChecks:
    """The invariants of a single node, independent of its position."""

    owner: nn.Module
    sizes: Mapping[str, int]
    """A size for each symbol."""
    infers: bool
    """True to compare types with those that ops infer."""

    def node(self, node: fx.Node) -> Iterator[str]:
        match node.op:
            case "call_function":
                yield from self._function(node)
            case "get_attr":
                if attribute(self.owner, str(node.target)) is None:
                    yield f"there is no parameter, buffer or graph {node.target!r}"
                yield from why_not_constant_type(node, attribute(self.owner, str(node.target)))
            case "call_module":
                if not isinstance(attribute(self.owner, str(node.target)), nn.Module):
                    yield f"unknown module {node.target!r}"
            case "placeholder" | "output" | "call_method":
                pass
            case _:
                yield f"{node.op!r} is not a kind of node"

    def _function(self, node: fx.Node) -> Iterator[str]:
        target: Any = node.target
        if isinstance(target, OpOverload):
            faults = [*why_not_call(node, target)]
            types = why_not_type(node, target, self.sizes) if self.infers else ()
            yield from faults or (*types, *why_not_pair(node, target, self.owner))
        elif target is operator.getitem:
            yield from _why_not_item(node)
        elif isinstance(target, HigherOrderOperator):
            yield from why_not_nested(node, target, self.owner)
        elif not callable(target):
            yield f"the target {target!r} cannot be called"


def _why_not_item(node: fx.Node) -> Iterator[str]:
    if len(node.args) != 2:
        yield "getitem takes a value and an index"
        return
    source, index = node.args
    kind = type_of(source) if isinstance(source, fx.Node) else None
    if isinstance(kind, TupleType) and isinstance(index, int) and not -len(kind.items) <= index < len(kind.items):
        yield f"item {index} of {kind}, which has {len(kind.items)}"
