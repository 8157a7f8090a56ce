"""Fused ops: each replaces one or several calls of the model."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from quantc.capture.runtime.tracing import SeenAt
from quantc.flows.tracing.extract_program import Compute, extract_program, grid_made, grid_read
from quantc.flows.tracing.traced_tensor import Grid, Levels, float32_of, floats_of, levels_on, value_of
from quantc.ir.program import TRAINED, Program
from quantc.qat.fake_quantize_insertion import MODES, NORMS
from quantc.qdq.ops import belongs_to_qdq

Path = tuple[Any, ...]
"""Path of a tensor in the arguments of a call: 0 for positional ones or 1 for keywords, then keys."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that a call was given, and that the model computes of its parameters alone: it is folded."""

    position: int
    key: str
    sources: tuple[str, ...]
    """The parameters and buffers that it is computed of, by name."""
    digest: str
    """Digest of the recorded value."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call of the model, as it was first seen."""

    number: int
    name: str
    reads: tuple[str, ...]
    """The node of each tensor that it was given, by name."""
    parameters: tuple[str, ...]
    """The name of each in the model; empty unless it is a parameter or buffer."""
    paths: tuple[Path, ...]
    """The path of each in the arguments."""
    makes: tuple[str, ...]
    fixed: tuple[tuple[Path, Any], ...]
    """Its other arguments."""
    gives_first: bool
    """True if it returns its first argument itself, written to or not."""
    gives_view: bool
    """True if it returns a view of an argument."""
    writes_others: bool
    """True if it writes to other tensors: `out=`, lists of tensors."""
    is_used: bool
    """True if its result is read."""
    derived: tuple[Derived, ...] = ()
    """The tensors among them that are computed from parameters alone."""
    computes: bool = True
    """False for no-ops and dead code, before constant folding: a cast to the dtype at hand, dropout in inference, an unread
    result."""
    may_fold: bool = False
    """True if its op can be folded into the convolution or linear before it."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a fused op reads."""

    call: int
    position: int
    """Among the tensors that the call was given."""
    path: Path
    value: str
    """The node that makes it, by name."""
    dtype: torch.dtype | None
    groups: tuple[str, ...] = ()
    """The groups that observe it."""


@dataclass(eq=False)
class Unit:
    """A fused op."""

    root: str
    """The node whose value it computes, by name."""
    rule: str
    members: tuple[int, ...]
    """The calls that it does the work of."""
    operands: tuple[Operand, ...]
    constants: dict[int, list[tuple[Path, str]]]
    """Parameters and buffers that each call must be given, and where."""
    links: dict[int, list[tuple[Path, str]]]
    """The arguments of each call that come from other members: path, and defining node."""
    makes: dict[int, str]
    """The node that each call makes, by name."""
    in_place: frozenset[int]
    """The calls that give the tensor which they are given first."""
    passive: frozenset[int]
    """The calls that compute nothing."""
    derived: dict[int, list[tuple[Path, Derived]]]
    """The arguments of calls that are computed from parameters: path, and recorded value."""
    own: frozenset[str] = frozenset()
    """Its nodes in the prepared program, by name."""
    is_product: bool = False
    trigger: int = 0
    """The call at which all operands are there."""
    grids: tuple[Grid | None, ...] = ()
    out_grid: Grid | None = None
    computes: dict[tuple[Grid | None, ...], Compute] = field(default_factory=dict)
    by_call: dict[int, list[tuple[int, Path]]] = field(default_factory=dict)
    rounders: tuple[fx.Node | None, ...] = ()
    """In training: the node that rounds each operand."""
    trained_values: tuple[str, ...] = ()
    """In training: the node that makes each operand, by name. A norm that the op before has folded is brought back behind that op, and
    that op has computed it."""
    trained_root: str = ""
    yielded: str = ""
    """In training: the fake quantizer of its result, by name; empty if each reader has its own."""
    modes: dict[int, list[str]] = field(default_factory=dict)
    """In training: the modules of the program that follow the mode of a call, by name."""
    reading: tuple[int, ...] = ()
    """The operands that are computed with: each tensor once, in order."""
    direct: Compute | None = None
    """The computation from bytes on its own grids, built on first use."""
    _building: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for number, operand in enumerate(self.operands):
            self.by_call.setdefault(operand.call, []).append((number, operand.path))
        self.is_fused = len(self.members) > 1
        first = self.members[0]
        rows = self.by_call.get(first, [])
        is_chain = len(rows) == 1 and all(self.links[call] for call in self.members[1:])
        self.begins = {first: rows[0][0]} if is_chain else {}
        """For a fused op of which all calls but the first read another: that first call, and the one operand that it reads."""
        values = [operand.value for operand in self.operands]
        self.reading = tuple(values.index(value) for value in dict.fromkeys(values))
        self.trigger = max((operand.call for operand in self.operands), default=self.members[0])

    def fake_quantizers(self, program: Program) -> list[str]:
        """The fake quantizers of its operands, by the last part of their names; weights with a norm are read behind it."""
        found: dict[str, None] = {}
        pending = [node for name in sorted(self.own) for node in program.node(name).all_input_nodes]
        while pending:
            node = pending.pop()
            if node.op == "call_module" and str(node.target).startswith(TRAINED):
                found[str(node.target).rpartition(".")[2]] = None
            elif is_put_in(node):
                pending.extend(node.all_input_nodes)
        return list(found)

    def settle(self, program: Program) -> None:
        """Read off a quantized program which grids it works on."""
        nodes = {node.name: node for node in program.graph.nodes}
        grids: dict[str, Grid] = {}
        for node in self._between(nodes, self.root, (operand.value for operand in self.operands)):
            if (found := grid_read(node)) is not None:
                grids.setdefault(found[0].name, found[1])
        self.grids = tuple(_one(grids.get(operand.value)) for operand in self.operands)
        self.out_grid = _one(grid_made(nodes[self.root]))
        self.computes.clear()
        self.direct = None

    def settle_training(self, program: Program) -> None:
        """Read off a program that is trained what rounds its operands, and where its norm is."""
        nodes = {node.name: node for node in program.graph.nodes}
        rounders: dict[str, fx.Node] = {}
        self.trained_values = tuple(_with_norm(nodes[operand.value]).name for operand in self.operands)
        for node in self._between(nodes, self.root, self.trained_values):
            if node.args and node.op == "call_module" and TRAINED in str(node.target):
                rounders.setdefault(getattr(node.args[0], "name", ""), node)
        self.rounders = tuple(rounders.get(name) for name in self.trained_values)
        self.trained_root = _with_norm(nodes[self.root]).name if self.root in self.own else self.root
        self.yielded = self._result_quantizer(program, nodes[self.trained_root])
        calls = {name: call for call, name in self.makes.items()}
        for name in self.own:  # an op of several results is none of them
            if isinstance(origin := program.origins.get(nodes[name]), SeenAt):
                calls[name] = origin.call
        self.modes = {}
        for node in self._between(nodes, self.trained_root, self.trained_values):
            holder, _, name = str(node.target).partition(".")
            call = calls.get(name.removeprefix("fold_"))
            if node.op == "call_module" and holder in (NORMS, MODES) and call is not None:
                self.modes.setdefault(call, []).append(str(node.target))

    def _result_quantizer(self, program: Program, last: fx.Node) -> str:
        """The fake quantizer of its result, if the plan rounds the result and the quantizer is its only reader; else empty."""
        places = (site for group in program.plan.groups for site in group.places)
        if not any(site.operand is None and site.node == self.root and not site.graph for site in places):
            return ""
        readers = list(last.users)
        is_one = len(readers) == 1 and readers[0].op == "call_module" and str(readers[0].target).startswith(TRAINED)
        return str(readers[0].target) if is_one else ""

    def _between(self, nodes: Mapping[str, fx.Node], last: str, values: Iterable[str]) -> list[fx.Node]:
        """The nodes from those that make its operands to one that is the last, the last first."""
        wanted = set(values)
        found: dict[fx.Node, None] = {}
        pending = [nodes[last]]
        while pending:
            node = pending.pop()
            if node not in found and node.name not in wanted:
                found[node] = None
                pending.extend(node.all_input_nodes)
        return list(found)

    # -- running ---------------------------------------------------------------------------------------------------

    def run_trained(self, program: Program, operands: Mapping[int, Any], rounded: Any) -> Any:
        """Compute it as it will be rounded; `rounded` does that to an operand."""
        values: dict[str, Any] = {}
        for number, (value, rounder) in enumerate(zip(self.trained_values, self.rounders, strict=True)):
            name = value if rounder is None else rounder.name
            x = operands[number]
            values.setdefault(name, x.value if type(x) is Rounded else rounded(rounder, floats_of(x)))
        if () not in self.computes:
            self.computes[()] = Compute(
                extract_program(program, self.trained_root, list(values), {}, None, self.root), None
            )
        return self.computes[()].forward(*values.values())

    def run_float(self, program: Program, operands: Mapping[int, Any]) -> Any:
        """Compute it in float, as it is before it is converted."""
        compute = self.compute(program, (None,) * len(self.operands), None)
        return compute.forward(*(floats_of(operands[number]) for number in self.reading))

    def run_quantized(self, program: Program, operands: Mapping[int, Any], target: str) -> Any:
        """Run it on a kernel. Bytes are read unchanged; the kernel rounds floats. Returns a value, or floats in new memory."""
        direct = self.direct
        if direct is not None:
            levels = []
            for number in self.reading:
                x = operands[number]
                value = x if type(x) is Levels else value_of(x)
                if type(value) is not Levels or value.grid is not self.grids[number]:
                    break
                levels.append(value.levels)
            else:
                made = direct.forward(*levels)
                if self.out_grid is not None:
                    return Levels(made, self.out_grid)
                return made.clone() if any(_shares(made, x) for x in levels) else made
        return self._run_on_forms(program, operands, target)

    def _run_on_forms(self, program: Program, operands: Mapping[int, Any], target: str) -> Any:
        given: list[Tensor] = []
        forms: list[Grid | None] = [None] * len(self.operands)
        for number in self.reading:
            x, grid = operands[number], self.grids[number]
            value = x if type(x) is Levels else value_of(x)
            if grid is not None and type(value) is Levels:
                given.append(levels_on(value, grid).levels)
                forms[number] = grid
            else:
                given.append(float32_of(x))
        if len(given) < len(forms):  # one tensor that is read twice
            first = {self.operands[number].value: forms[number] for number in self.reading}
            forms = [first[operand.value] for operand in self.operands]
        compute = self.compute(program, tuple(forms), target)
        if tuple(forms) == self.grids and None not in forms:
            self.direct = compute
        made = compute.forward(*given)
        if self.out_grid is not None:
            return Levels(made, self.out_grid)
        return made.clone() if any(_shares(made, x) for x in given) else made

    def compute(self, program: Program, given: tuple[Grid | None, ...], target: str | None) -> Compute:
        """The computation for operands in given forms, built once."""
        found = self.computes.get(given)
        if found is None:
            with self._building:
                found = self.computes.get(given) or self._build_compute(program, given, target)
                self.computes[given] = found
        return found

    def _build_compute(self, program: Program, given: tuple[Grid | None, ...], target: str | None) -> Compute:
        names = list(dict.fromkeys(operand.value for operand in self.operands))
        on_grids = {operand.value: grid for operand, grid in zip(self.operands, given, strict=True) if grid is not None}
        made = Compute(extract_program(program, self.root, names, on_grids, self.out_grid, self.root), target)
        if self.out_grid is not None:
            made.leave_order()
        return made


_GRIDS: dict[Grid, Grid] = {}


def _one(grid: Grid | None) -> Grid | None:
    """The same object for grids that are alike."""
    return None if grid is None else _GRIDS.setdefault(grid, grid)


def _with_norm(node: fx.Node) -> fx.Node:
    """In training: the node that has the value of another once the norm is brought back that was folded into it."""
    behind = [user for user in node.users if user.op == "call_module" and str(user.target).startswith(NORMS)]
    return next((user for user in behind if user.args[0] is node), node)


def _shares(made: Any, x: Tensor) -> bool:
    return isinstance(made, Tensor) and made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class Rounded:
    """An operand that was rounded in training before the others were there."""

    value: Tensor


def is_put_in(node: fx.Node) -> bool:
    """True for nodes that quantc inserts: Q/DQ ops, and in training fake quantizers, unfolded norms and mode switches."""
    if belongs_to_qdq(node):
        return True
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return is_put_in(node.args[0])
    return node.op == "call_module" and str(node.target).startswith((TRAINED, NORMS, MODES))


def behind_put_in(node: fx.Node) -> fx.Node:
    """The node whose value an inserted node has."""
    while is_put_in(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def reach(args: tuple[Any, ...], kwargs: Mapping[str, Any], path: Path) -> Any:
    """The argument at a path; None if there is none."""
    if len(path) == 2 and path[0] == 0:
        return args[path[1]] if path[1] < len(args) else None
    found: Any = args if path[0] == 0 else kwargs
    for key in path[1:]:
        try:
            found = found[key]
        except (IndexError, KeyError, TypeError):
            return None
    return found
