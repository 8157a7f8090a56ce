"""The graph of a program with its side tables: reading it, and changing it.

Passes change a Program only through `emit`, `constant`, `replace` and `erase`: these keep the side tables in sync with
the graph, and invalidate the runnable module. It is rebuilt lazily, on the next access, not once a pass (rebuilding
costs 35-150 µs a node).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from quantc.errors import UnknownNameError, suggest
from quantc.ir.dialect import is_opaque, short_name
from quantc.ir.finite_inputs import Watch
from quantc.ir.graph_tree import GraphTree, attribute
from quantc.ir.placements import Placements
from quantc.ir.plan import Plan
from quantc.ir.signature import Signature
from quantc.ir.sites import ModeValue, NodeTable, Origin, SetAside, Site
from quantc.ir.stage import LogEntry, Stage
from quantc.ir.types import type_of_value

MAX_REASONS = 8


@dataclass(eq=False)
class ProgramGraph(GraphTree):
    """State of a Program: its graphs, their side tables, and the operations that keep them in sync."""

    signature: Signature
    name: str = "program"
    method: str = "given"
    """The capture method: "export", "fx", "parsed" or "given"."""
    training: bool = False
    stage: Stage = Stage.CAPTURED
    inference_only: tuple[str, ...] = ()
    """Reasons why `.train()` is no longer possible; empty while it is."""
    fixed_mode: str = ""
    """The reason why neither `.train()` nor `.eval()` can change the mode; empty if they can."""
    log: list[LogEntry] = field(default_factory=list)
    origins: NodeTable[Origin] = field(default_factory=NodeTable[Origin])
    modes: NodeTable[ModeValue] = field(default_factory=NodeTable[ModeValue])
    counters: NodeTable[str] = field(default_factory=NodeTable[str])
    """For each batch norm: the buffer that counts its training batches."""
    set_aside: NodeTable[SetAside] = field(default_factory=NodeTable[SetAside])
    """For convolutions and linears in quantization-aware training: the batch norm detached from them."""
    plan: Plan = field(default_factory=Plan)
    """The decisions about its quantization."""
    placements: Placements = field(default_factory=Placements)
    """The kernels of its ops, once `place-kernels` has run."""
    example_inputs: tuple[Any, ...] | None = None
    """The flat example inputs of the capture, for the numeric guard."""
    _module: fx.GraphModule | None = field(default=None, repr=False)
    _watched: tuple[fx.GraphModule, Watch] | None = field(default=None, repr=False)
    _taken: dict[str, int] = field(default_factory=dict, repr=False)
    """The number of constants stored under each hint."""

    # -- reading ---------------------------------------------------------------------------------------------

    def node(self, name: str) -> fx.Node:
        """The node of that name; `branch/name` for one in a nested graph."""
        path, _, short = name.rpartition("/")
        for graph_path, graph in self.graphs():
            if graph_path != path:
                continue
            found: list[fx.Node] = [node for node in graph.nodes if node.name == short]
            if found:
                return found[0]
        names = [node.name if not path else f"{path}/{node.name}" for path, g in self.graphs() for node in g.nodes]
        raise UnknownNameError(f"unknown node {name!r}", where=self.name, advice=suggest(name, names, noun="nodes"))

    def has_node(self, name: str) -> bool:
        """True if there is a node of that name."""
        path, _, short = name.rpartition("/")
        return any(node.name == short for at, graph in self.graphs() if at == path for node in graph.nodes)

    def module_nodes(self, path: str) -> list[fx.Node]:
        """The nodes that originate from the module at a path or from its submodules."""
        rows = self.origins.rows
        return [
            node
            for node in self.nodes()
            if (origin := rows.get(node)) is not None and f"{origin.module_path}.".startswith(f"{path}.")
        ]

    def site(self, node: fx.Node, *, out: int | None = None, operand: int | None = None) -> Site:
        path = next((path for path, graph in self.graphs() if graph is node.graph), "")
        return Site(path, node.name, out=0 if out is None and operand is None else out, operand=operand)

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The parameter, buffer or constant that a get_attr node refers to; None if it is something else."""
        if node.op != "get_attr":
            return None
        value = attribute(self.owner(node.graph), str(node.target))
        return value if isinstance(value, torch.Tensor) else None

    def describe(self, node: fx.Node) -> str:
        """A node and its origin, for messages: `conv2d (layer1.0 : Conv2d @ model.py:12)`."""
        origin = self.origins.get(node)
        return f"{node.name} ({origin})" if origin is not None and str(origin) else node.name

    def opaque(self) -> list[fx.Node]:
        """Nodes without a canonical form: no pattern matches them."""
        return [node for node in self.nodes() if is_opaque(node)]

    # -- changing --------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Mark the graph as changed; the module is rebuilt lazily."""
        self._module = None

    def emit(
        self,
        target: Callable[..., Any] | str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        before: fx.Node,
        like: fx.Node | None = None,
        name: str | None = None,
        value: Any = None,
    ) -> fx.Node:
        """Insert a call of a function, or of a module by its name, before a node. Its origin is that of `like` (by
        default `before`), and its type that of `value`, or of `like` if that is given."""
        graph = before.graph
        if name is None and isinstance(target, OpOverload):
            name = short_name(target)
        with graph.inserting_before(before):
            kind = "call_module" if isinstance(target, str) else "call_function"
            node = graph.create_node(kind, target, args, kwargs or {}, name=name)
        source = like if like is not None else before
        if value is not None:
            node.meta["val"] = value
        elif like is not None and "val" in like.meta:
            node.meta["val"] = like.meta["val"]
        if (origin := self.origins.get(source)) is not None:
            self.origins[node] = origin
        self._module = None
        return node

    def read(self, target: str, *, before: fx.Node) -> fx.Node:
        """Insert a get_attr node for `target` before a node."""
        value = attribute(self.owner(before.graph), target)
        with before.graph.inserting_before(before):
            node = before.graph.create_node("get_attr", target)
        if isinstance(value, torch.Tensor):
            node.meta["val"] = type_of_value(value)
        self._module = None
        return node

    def constant(self, hint: str, value: torch.Tensor, *, before: fx.Node) -> fx.Node:
        """Store a new constant under a name like `hint` and insert its get_attr node before `before`.

        A parameter stays a parameter, anything else becomes a buffer. The name may contain dots.
        """
        parent, _, leaf = hint.rpartition(".")
        holder = _submodule(self.owner(before.graph), parent)
        name = self._free_name(holder, leaf, hint)
        if isinstance(value, nn.Parameter):
            holder.register_parameter(name, value)
        else:
            holder.register_buffer(name, value)
        return self.read(f"{parent}.{name}" if parent else name, before=before)

    def subgraph(self, hint: str, graph: fx.Graph, *, before: fx.Node) -> fx.Node:
        """Store a nested graph, which refers to no constants, under a name like `hint`, and insert its get_attr node
        before `before`."""
        owner = self.owner(before.graph)
        name = self._free_name(owner, hint, hint)
        owner.add_module(name, fx.GraphModule(nn.Module(), graph))
        return self.read(name, before=before)

    def _free_name(self, holder: nn.Module, leaf: str, hint: str) -> str:
        """A name like `leaf` that a module does not have yet."""
        name = leaf
        while hasattr(holder, name):
            # counted, not searched from 1: a pass may store thousands under one hint
            self._taken[hint] = self._taken.get(hint, 0) + 1
            name = f"{leaf}_{self._taken[hint]}"
        return name

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace all uses of `old` by the new node `new`, move `old`'s rows to it, and erase `old`."""
        old.replace_all_uses_with(new)
        self.inherit(old, new)
        self.erase(old)

    def inherit(self, old: fx.Node, new: fx.Node) -> None:
        """Move `old`'s rows to its replacement `new`."""
        for table in self._tables:
            table.move(old, new)

    def forward(self, old: fx.Node, to: fx.Node) -> None:
        """Replace all uses of `old` by the existing node `to`; erase `old` and its rows."""
        old.replace_all_uses_with(to)
        self.erase(old)

    def erase(self, node: fx.Node) -> None:
        """Remove a node without users, and its rows."""
        node.graph.erase_node(node)
        for table in self._tables:
            table.drop(node)
        self._module = None

    @property
    def _tables(self) -> tuple[NodeTable[Any], ...]:
        """The side tables keyed by node."""
        return (self.origins, self.modes, self.counters, self.set_aside, *self.plan.tables, *self.placements.tables)

    def note_inference_only(self, reason: str) -> None:
        """Record why the program can no longer be trained; only the first few reasons are kept."""
        if len(self.inference_only) < MAX_REASONS and reason not in self.inference_only:
            self.inference_only = (*self.inference_only, reason)


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The submodule at a path, created from plain modules if missing."""
    module = root
    for part in path.split(".") if path else ():
        child = getattr(module, part, None)
        if not isinstance(child, nn.Module):
            child = nn.Module()
            module.add_module(part, child)
        module = child
    return module
