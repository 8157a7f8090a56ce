"""Sinking of constants into nested graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import networkx as nx
from torch import fx, nn
from torch._ops import HigherOrderOperator

from quantc.ir.alias_analysis import operands_written, sources_of
from quantc.ir.program import Program, Stage, attribute
from quantc.ir.sites import Origin
from quantc.ir.subgraphs import called_graphs, form_of
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.constant_order import order_constants

TRAINING = "nested graphs stay as they are in training: gradients reach constants only through the call"

GRADIENTS_LOST = "parameters were moved into nested graphs, where no gradient reaches them"


class SinkConstants(Pass):
    """Let branches, loop bodies and regions read parameters and buffers themselves.

    A captured `cond`, `while_loop`, `scan`, `map` or region passes every tensor to its graphs as an operand, weights
    too. Inside, a weight looks like any other input: a batch norm cannot be folded into it, and no backend can store it
    as integers. This pass lets the graphs refer to the constant, and drops the operand from the call. Nothing is
    copied: both names refer to one tensor. An op without a module of its own is then named after the one whose
    constants it reads, so that a config can select it.

    Carried values and tensors that are sliced step by step stay operands. So does a constant that is written to, and
    one for which two calls of the same graph pass different tensors; the log says which.

    Gradients do not reach a parameter through a nested graph, so the program is inference-only afterwards. A program in
    training mode is left unchanged.
    """

    name: ClassVar[str] = "sink-constants"
    needs: ClassVar[Stage] = Stage.CAPTURED
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    purpose: Literal["inference", "training"] = "inference"
    """For training the nested graphs are to run as plain Python, in which gradients reach their constants: see
    `insert-fake-quantize`."""

    def run(self, program: Program) -> Outcome:
        families = _families(program)
        if not families:
            return Outcome(False)
        if program.training:
            return Outcome(False, (TRAINING,))
        refused = _written(program, families)
        moved: Counter[str] = Counter()
        while sum(_sink(program, family, refused, moved) for family in families):
            pass  # constants propagate to nested graphs: one iteration per level of nesting
        if (
            moved
            and self.purpose == "inference"
            and any(_lost(program, module) for f in families for module in f.graphs)
        ):
            program.note_inference_only(GRADIENTS_LOST)
        if moved:
            for module in (module for family in families for module in family.graphs):
                order_constants(program, module.graph)
        notes = [f"{count} constants moved into {path}" for path, count in moved.items() if count]
        return Outcome(bool(moved), (*notes, *_stayed(program, families, refused)))


@dataclass(frozen=True)
class _Family:
    """Calls that have graphs in common, and these graphs: an operand goes from all of them or from none."""

    calls: tuple[fx.Node, ...]
    graphs: tuple[fx.GraphModule, ...]
    names: tuple[str, ...]

    def columns(self) -> Iterator[tuple[int, list[fx.Node]]]:
        """For each operand that every call can do without, if it is given constants: which these are."""
        rows = [(form.operands(call.args), form.captured(call.args)) for call in self.calls if (form := form_of(call))]
        for index in range(max(captured.start for _, captured in rows), min(captured.stop for _, captured in rows)):
            column = [operands[index] for operands, _ in rows]
            if all(isinstance(operand, fx.Node) and operand.op == "get_attr" for operand in column):
                yield index, column

    def given_for(self, inputs: set[fx.Node]) -> Iterator[fx.Node]:
        """Operands of the calls for some of the graphs' inputs."""
        entries = [module.graph.find_nodes(op="placeholder") for module in self.graphs]
        indices = {index for nodes in entries for index, node in enumerate(nodes) if node in inputs}
        for call in self.calls:
            form = form_of(call)
            operands = form.operands(call.args) if form is not None else []
            yield from (operands[index] for index in indices if isinstance(operands[index], fx.Node))


def _families(program: Program) -> list[_Family]:
    """The calls of nested graphs, by the graphs they share. Graphs that something unknown refers to are left out."""
    ties: nx.Graph[fx.Node | fx.GraphModule] = nx.Graph()
    names: dict[fx.GraphModule, str] = {}
    unknown: set[fx.GraphModule] = set()
    for path, node, module in _references(program):
        names.setdefault(module, f"{path}/{node.target}".lstrip("/"))
        ties.add_edges_from((user, module) for user in node.users)
        if any(module not in called_graphs(program, user) for user in node.users):
            unknown.add(module)
    order = {member: number for number, member in enumerate(ties)}
    families: list[_Family] = []
    for found in nx.connected_components(ties):
        members = sorted(found, key=order.__getitem__)
        graphs = tuple(member for member in members if isinstance(member, fx.GraphModule))
        if unknown.isdisjoint(graphs):
            calls = tuple(member for member in members if isinstance(member, fx.Node))
            families.append(_Family(calls, graphs, tuple(names[module] for module in graphs)))
    return families


def _references(program: Program) -> Iterator[tuple[str, fx.Node, fx.GraphModule]]:
    """The nodes that refer to nested graphs, outermost first."""
    for path, graph in program.graphs():
        for node in graph.find_nodes(op="get_attr"):
            module = attribute(program.owner(graph), str(node.target))
            if isinstance(module, fx.GraphModule):
                yield path, node, module


def _written(program: Program, families: list[_Family]) -> dict[int, str]:
    """Tensors that some graph writes to (by id), with the reason to leave them. Calls themselves write nothing: a
    graph's writes to its inputs are seen in the graph.
    """
    touched: set[fx.Node] = set()
    for _, graph in program.graphs():
        direct = (node for node in graph.nodes if not isinstance(node.target, HigherOrderOperator))
        touched |= sources_of(place for node in direct for place in operands_written(node))
    found: dict[int, str] = {}
    for node in touched:
        _refuse(program, node, found)
    for family in reversed(families):  # innermost first: writes propagate outward through the operands
        for operand in list(family.given_for(touched)):
            touched.add(operand)
            _refuse(program, operand, found)
    return found


def _refuse(program: Program, node: fx.Node, found: dict[int, str]) -> None:
    tensor = program.tensor(node)
    if tensor is not None:
        found[id(tensor)] = f"{node.target} stays an operand: the program writes to it"


def _sink(program: Program, family: _Family, refused: dict[int, str], moved: Counter[str]) -> int:
    """Move what can be moved into the graphs of a family; how many operands that were."""
    dropped: dict[int, fx.Node] = {}
    for index, column in family.columns():
        tensors = {id(program.tensor(operand)) for operand in column}
        if len(tensors) == 1 and program.tensor(column[0]) is not None and not tensors & refused.keys():
            dropped[index] = column[0]
    if not dropped:
        return 0
    for module, name in zip(family.graphs, family.names, strict=True):
        inputs = module.graph.find_nodes(op="placeholder")
        first = next(node for node in module.graph.nodes if node.op != "placeholder")
        for index, operand in dropped.items():
            moved[name] += _stand_in(program, inputs[index], operand, before=first)
    for call in family.calls:
        _drop(program, call, set(dropped))
    return len(dropped)


def _stand_in(program: Program, entry: fx.Node, outer: fx.Node, *, before: fx.Node) -> bool:
    """Let a constant stand for an input of a nested graph; whether anything there reads it."""
    tensor = program.tensor(outer)
    if tensor is None or not entry.users:
        program.erase(entry)
        return False
    for reader in entry.users:
        _name(program, reader, str(outer.target))
    node = program.constant(str(outer.target), tensor, before=before)
    _keep_kind(program, outer, node)
    program.forward(entry, node)
    return True


def _lost(program: Program, module: fx.GraphModule) -> bool:
    """True if a nested graph has trainable parameters."""
    tensors = (program.tensor(node) for node in module.graph.find_nodes(op="get_attr"))
    return any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in tensors)


def _drop(program: Program, call: fx.Node, indices: set[int]) -> None:
    """Remove some operands of a call, and their constants if they have no other user."""
    form = form_of(call)
    if form is None:
        return
    sources = dict.fromkeys(call.all_input_nodes)
    call.args = form.without(call.args, indices)
    program.touch()
    for node in sources:
        if node.op == "get_attr" and not node.users:
            program.erase(node)


def _keep_kind(program: Program, outer: fx.Node, inner: fx.Node) -> None:
    """A buffer that is not saved stays one that is not saved."""
    old, old_leaf = _holder(program, outer)
    new, new_leaf = _holder(program, inner)
    if new_leaf in new._buffers and (old_leaf in old._non_persistent_buffers_set or old_leaf not in old._buffers):
        new._non_persistent_buffers_set.add(new_leaf)


def _holder(program: Program, node: fx.Node) -> tuple[nn.Module, str]:
    parent, _, leaf = str(node.target).rpartition(".")
    return program.owner(node.graph).get_submodule(parent), leaf


def _name(program: Program, reader: fx.Node, target: str) -> None:
    """Say which module an op belongs to, if it is not known: that of the constants it reads."""
    origin = program.origins.get(reader) or Origin()
    path = target.rpartition(".")[0]
    if not origin.module_path and not origin.module_type and reader.op == "call_function" and path:
        program.origins[reader] = Origin(path, "", origin.file, origin.line)


def _stayed(program: Program, families: list[_Family], refused: dict[int, str]) -> list[str]:
    """The reasons why constants remain operands."""
    notes: dict[str, None] = {}
    for family in families:
        for _, column in family.columns():
            for operand in column:
                tensor = program.tensor(operand)
                if tensor is not None:
                    other = (
                        f"{operand.target} stays an operand: other calls of {family.names[0]} are given another tensor"
                    )
                    notes[refused.get(id(tensor), other)] = None
    return list(notes)
