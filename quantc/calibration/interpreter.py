"""Interpreter that runs a program node by node and passes selected values to watchers, without modifying its graph.

Each graph is compiled once into a flat list of steps: the callee, the slots of its operands, and the values whose last
use it is. A step costs about a microsecond on top of the op itself. Graphs of higher-order ops run the same way, so
that values inside branches and loops can be watched too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import OpOverload

from quantc.errors import CalibrationError, QuantcError
from quantc.ir.dialect import BY_NAME, in_place, may_alias, ops_in
from quantc.ir.op_row import Family
from quantc.ir.program import Program, attribute
from quantc.ir.subgraphs import form_of
from quantc.ir.types import tensor_type
from quantc.observe.module import ObserverModule
from quantc.text.literals import used_nodes

Watch = Callable[[Any], None]
"""Callback with the value of a node, right after it has been computed."""
Values = list[Any]
Read = Callable[[Values], Any]

aten = torch.ops.aten
IN_PLACE: dict[Any, Callable[..., Any]] = {
    row.target: written
    for row in (BY_NAME[name] for name in (*ops_in(Family.ACTIVATION), "add", "mul"))
    if (written := in_place(row)) is not None
}
"""In-place forms of ops, for operands at their last use: the same numbers without an allocation."""


@dataclass(slots=True)
class _Step:
    """One call. `args` is a template; `reads` says which of them are values, by position and slot."""

    node: fx.Node
    call: Callable[..., Any]
    args: list[Any]
    reads: tuple[tuple[int, int], ...]
    builds: tuple[tuple[int, Read], ...]
    """Arguments that hold values inside a list, tuple, dict or slice."""
    keywords: dict[str, Any]
    keyword_builds: tuple[tuple[str, Read], ...]
    slot: int
    watch: Watch | None
    done: tuple[int, ...]
    """The slots that are dead afterwards."""


class CompiledGraph:
    """A graph ready to run: call it with one value per input."""

    def __init__(self, runner: Runner, graph: fx.Graph) -> None:
        self._program = runner.program
        self._slots: dict[fx.Node, int] = {}
        self._start: Values = []
        self._steps: list[_Step] = []
        self._inputs: list[tuple[int, Watch | None]] = []
        self._give: Read = list
        self._compile(runner, graph)

    def _compile(self, runner: Runner, graph: fx.Graph) -> None:
        owner = runner.program.owner(graph)
        last = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                self._give = self._build(node.args[0])
                continue
            self._slots[node] = slot = len(self._start)
            self._start.append(None)
            if node.op == "get_attr":
                self._start[slot] = runner.constant(node, owner)
            elif node.op == "placeholder":
                self._inputs.append((slot, runner.watch.get(node)))
            else:
                call = _callee(node, owner, runner.watch)
                self._steps.append(self._step(node, call, slot, runner.watch.get(node), last.get(node, ())))

    def _step(
        self, node: fx.Node, call: Callable[..., Any], slot: int, watch: Watch | None, done: Sequence[fx.Node]
    ) -> _Step:
        reads = [(index, self._slots[value]) for index, value in enumerate(node.args) if isinstance(value, fx.Node)]
        builds = [
            (index, self._build(value))
            for index, value in enumerate(node.args)
            if not isinstance(value, fx.Node) and _holds_values(value)
        ]
        named = [(name, self._build(value)) for name, value in node.kwargs.items() if _holds_values(value)]
        return _Step(
            node,
            call,
            [None if isinstance(value, fx.Node) else value for value in node.args],
            tuple(reads),
            tuple(builds),
            dict(node.kwargs),
            tuple(named),
            slot,
            watch,
            # an unused result is dropped at once
            tuple(self._slots[value] for value in (*done, *(() if node.users else (node,)))),
        )

    def _build(self, value: Any) -> Read:
        """Function that assembles an argument from the current values."""
        if isinstance(value, fx.Node):
            return operator.itemgetter(self._slots[value])
        if not _holds_values(value):
            return lambda values: value
        if isinstance(value, dict):
            rows = {key: self._build(item) for key, item in value.items()}
            return lambda values: {key: build(values) for key, build in rows.items()}
        if isinstance(value, slice):
            ends = [self._build(end) for end in (value.start, value.stop, value.step)]
            return lambda values: slice(*(build(values) for build in ends))
        kind, items = type(value), [self._build(item) for item in value]
        if kind in (tuple, list) or not hasattr(kind, "_make"):
            kind = tuple if isinstance(value, tuple) else list
            return lambda values: kind([build(values) for build in items])
        return lambda values: kind(*(build(values) for build in items))

    def __call__(self, *inputs: Any) -> Any:
        values = self._start.copy()
        for (slot, watch), given in zip(self._inputs, inputs, strict=True):
            values[slot] = given
            if watch is not None:
                watch(given)
        step: _Step | None = None
        try:
            for step in self._steps:
                args = step.args.copy()
                for position, source in step.reads:
                    args[position] = values[source]
                for position, build in step.builds:
                    args[position] = build(values)
                keywords = step.keywords
                if step.keyword_builds:
                    keywords = {**keywords, **{name: build(values) for name, build in step.keyword_builds}}
                value = values[step.slot] = step.call(*args, **keywords)
                if step.watch is not None:
                    step.watch(value)
                for slot in step.done:
                    values[slot] = None
        except QuantcError:
            raise
        except Exception as error:
            raise CalibrationError(
                f"the program does not run on this input: {type(error).__name__}: {error}",
                where=self._program.describe(step.node) if step is not None else self._program.name,
                advice="see whether the float model runs on it; the error above this one says where it failed",
            ) from error
        return self._give(values)


class Runner:
    """A program with watchers on some of its nodes. Create a new one after the program has changed."""

    def __init__(self, program: Program, watch: Mapping[fx.Node, Watch]) -> None:
        self.program = program
        self.watch = watch
        self._graphs: dict[int, CompiledGraph] = {}
        _refuse_unknown(program, watch)
        self._top = CompiledGraph(self, program.graph)

    @torch.no_grad()
    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Run on flat inputs; flat outputs."""
        return list(self._top(*leaves))

    def constant(self, node: fx.Node, owner: nn.Module) -> Any:
        """Value of a get_attr node. A graph that a known op calls is compiled."""
        value = attribute(owner, str(node.target))
        if not isinstance(value, fx.GraphModule):
            return value
        if any(form_of(user) is None for user in node.users):
            value.recompile()
            return value
        if id(value) not in self._graphs:
            self._graphs[id(value)] = CompiledGraph(self, value.graph)
        return self._graphs[id(value)]


def _holds_values(value: Any) -> bool:
    return next(used_nodes(value), None) is not None


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that are read there for the last time. Constants stay."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for value in node.all_input_nodes:
            if value not in seen and value.op != "get_attr":
                seen.add(value)
                last.setdefault(node, []).append(value)
    return last


def _callee(node: fx.Node, owner: nn.Module, watch: Mapping[fx.Node, Watch]) -> Callable[..., Any]:
    if node.target in IN_PLACE and _is_free(node.args[0], watch):
        kind = tensor_type(node)  # a sum may be wider than its first operand
        if kind is not None and kind == tensor_type(node.args[0]):
            return IN_PLACE[node.target]
    if node.op == "call_module":
        module = attribute(owner, str(node.target))
        # observers are for direct runs of the module; here the watchers already see its input
        return _same if isinstance(module, ObserverModule) else cast("nn.Module", module)
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    return node.target  # type: ignore[return-value]


def _is_free(value: Any, watch: Mapping[fx.Node, Watch]) -> bool:
    """True if a value has memory of its own, and a single user."""
    if not isinstance(value, fx.Node) or value in watch or len(value.users) != 1:
        return False
    return isinstance(value.target, OpOverload) and not may_alias(value.target)


def _same(value: Any) -> Any:
    return value


def _refuse_unknown(program: Program, watch: Mapping[fx.Node, Watch]) -> None:
    """Values in a graph can only be watched if the op that calls it is known."""
    watched = {node.graph: node for node in watch}
    reached = {program.graph}
    for _, graph in program.graphs():
        for node in graph.find_nodes(op="get_attr"):
            child = attribute(program.owner(graph), str(node.target))
            if not isinstance(child, fx.GraphModule):
                continue
            caller = next((user for user in node.users if form_of(user) is None), None)
            if graph in reached and caller is None:
                reached.add(child.graph)
            elif child.graph in watched:
                raise CalibrationError(
                    f"{program.describe(watched[child.graph])} cannot be observed: nothing is known of how "
                    f"{caller.target if caller is not None else 'the op around it'} runs its graph",
                    where=program.describe(caller if caller is not None else node),
                    advice=f"leave it float: QuantConfig().set_node({watched[child.graph].name!r}, FLOAT)",
                )
