"""What is run where the model calls an op: fused ops, each over the calls that it does the work of."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from quantc.flows.tracing.cutting import Compute, cut, grid_made, grid_read
from quantc.flows.tracing.traced_tensor import (
    CARRIERS,
    Grid,
    Traced,
    arrived,
    float32_of,
    floats_of,
    kept,
    levels_on,
    on_grid,
)
from quantc.program import TRAINED, Program
from quantc.qat.insertion import MODES, NORMS
from quantc.qdq import belongs_to_qdq

if TYPE_CHECKING:
    from quantc.flows.tracing.trace import Trace

Path = tuple[Any, ...]
"""How to find a tensor among the arguments of a call: 0 for positional ones or 1 for keywords, then keys."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that a call was given, and that the model computes of its parameters alone: it is folded."""

    position: int
    key: str
    sources: tuple[str, ...]
    """The parameters and buffers that it is computed of, by name."""
    fingerprint: str


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call of the model, as it was first seen."""

    number: int
    name: str
    reads: tuple[str, ...]
    """The node of each tensor that it was given, by name."""
    parameters: tuple[str, ...]
    """What each is called in the model, if it is a parameter or buffer."""
    paths: tuple[Path, ...]
    """Where among its arguments these are."""
    makes: tuple[str, ...]
    fixed: tuple[tuple[Path, Any], ...]
    """Its other arguments."""
    writes_first: bool
    is_used: bool
    """Whether anything reads what it gave."""
    derived: tuple[Derived, ...] = ()
    """Those of the tensors that were computed of parameters alone."""
    computes: bool = True
    """Whether it is part of what is computed, before anything is folded: a cast to the dtype that is there, or dropout in inference,
    gives what it is given, and what nobody reads comes to nothing."""
    may_fold: bool = False
    """Whether the op that it is can be made part of a convolution or linear before it."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a fused op reads."""

    call: int
    position: int
    """Among the tensors that the call was given."""
    path: Path
    value: str
    """The node that makes it, by name."""
    groups: tuple[str, ...] = ()
    """What is to be observed of it."""


@dataclass
class Unit:
    """A fused op."""

    root: str
    """The node whose value it computes, by name."""
    rule: str
    members: tuple[int, ...]
    """The calls that it does the work of."""
    operands: tuple[Operand, ...]
    constants: tuple[tuple[int, Path, str], ...]
    """Parameters and buffers that the calls must be given: call, place, name."""
    in_place: frozenset[int]
    derived: tuple[tuple[int, Path, Derived], ...] = ()
    """What the calls must be given, that is computed of parameters: call, place, and what it was."""
    own: frozenset[str] = frozenset()
    is_product: bool = False
    trigger: int = 0
    """The call at which all operands are there."""
    grids: tuple[Grid | None, ...] = ()
    out_grid: Grid | None = None
    computes: dict[tuple[Grid | None, ...], Compute] = field(default_factory=dict)
    by_call: dict[int, list[tuple[int, Path]]] = field(default_factory=dict)
    _constants: dict[int, list[tuple[Path, str]]] = field(default_factory=dict)
    _building: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for number, operand in enumerate(self.operands):
            self.by_call.setdefault(operand.call, []).append((number, operand.path))
        for call, path, name in self.constants:
            self._constants.setdefault(call, []).append((path, name))
        values = [operand.value for operand in self.operands]
        self.reading = tuple(values.index(value) for value in dict.fromkeys(values))
        self.bits = {call: 1 << place for place, call in enumerate(self.members)}
        self.all_bits = (1 << len(self.members)) - 1
        self.trigger = max((operand.call for operand in self.operands), default=self.members[0])

    def kept(self, number: int, x: Any) -> Any:
        """An operand as it is now, for who looks into the fused op later: as it is rounded, where that is done anyway."""
        grid = self.grids[number] if self.grids else None
        return kept(x) if grid is None or not self.rounds_first else on_grid(levels_on(x, grid), grid)

    def operand_kept(self, trace: Trace, number: int, x: Any, cache: dict[Any, Any]) -> Any:
        """An operand as it is now, for the call at which the last one is there: before that it may be written to."""
        if trace.held.is_live:
            rounder = self.rounders[number]
            floats = floats_of(x)
            return Rounded(floats.clone() if rounder is None else _rounded(trace.held, rounder, floats, cache))
        if type(x) is Traced:
            return kept(x)
        grid = self.grids[number] if trace.is_converted else None
        return x.clone() if grid is None else on_grid(levels_on(x, grid), grid)

    @property
    def nodes(self) -> frozenset[str]:
        """Its nodes in the prepared program, by name."""
        return self.own

    def constants_of(self, call: int) -> list[tuple[Path, str]]:
        """The parameters that a call must be given, and where."""
        return self._constants.get(call, [])

    def derived_of(self, call: int) -> list[tuple[Path, Derived]]:
        """What a call must be given that is computed of parameters, and where."""
        return [(path, row) for number, path, row in self.derived if number == call] if self.derived else []

    def fake_quantizers(self, program: Program) -> list[str]:
        """What rounds its operands in training, by the last part of the name. Weights with a norm are brought back after it."""
        found: dict[str, None] = {}
        pending = [node for name in sorted(self.own) for node in program.node(name).all_input_nodes]
        while pending:
            node = pending.pop()
            if node.op == "call_module" and str(node.target).startswith(TRAINED):
                found[str(node.target).rpartition(".")[2]] = None
            elif is_put_in(node):
                pending.extend(node.all_input_nodes)
        return list(found)

    def writes_in_place(self, call: int) -> bool:
        return call in self.in_place

    @property
    def is_fused(self) -> bool:
        return len(self.members) > 1

    def settle(self, program: Program) -> None:
        """Read off a quantized program which grids it works on."""
        nodes = {node.name: node for node in program.graph.nodes}
        wanted = {operand.value for operand in self.operands}
        grids: dict[str, Grid] = {}
        pending, seen = [nodes[self.root]], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node in seen or node.name in wanted:
                continue
            seen.add(node)
            if (found := grid_read(node)) is not None and found[0].name in wanted:
                grids[found[0].name] = found[1]
                continue
            pending.extend(node.all_input_nodes)
        self.grids = tuple(grids.get(operand.value) for operand in self.operands)
        self.out_grid = grid_made(nodes[self.root])
        self.reads_bytes = bool(self.grids) and None not in self.grids
        self.grids_read = tuple(self.grids[number] for number in self.reading)
        self.computes.clear()
        self.direct = None

    def settle_training(self, program: Program) -> None:
        """Read off a program that is trained what rounds its operands, and where its norm is."""
        nodes = {node.name: node for node in program.graph.nodes}
        inside = set(self.own)
        pending, seen = [nodes[self.root]], set[fx.Node]()
        wanted = {operand.value for operand in self.operands}
        rounders: dict[str, fx.Node] = {}
        while pending:
            node = pending.pop()
            if node in seen or node.name in wanted:
                continue
            seen.add(node)
            source = node.args[0] if node.args and node.op == "call_module" else None
            if isinstance(source, fx.Node) and source.name in wanted and TRAINED in str(node.target):
                rounders[source.name] = node
                continue
            pending.extend(node.all_input_nodes)
        self.rounders = tuple(rounders.get(operand.value) for operand in self.operands)
        last = nodes[self.root]
        behind = [user for user in last.users if user.op == "call_module" and NORMS in str(user.target)]
        self.trained_root = behind[0].name if behind and self.root in inside else self.root

    rounders: tuple[fx.Node | None, ...] = ()
    """In training: the node that rounds each operand."""
    trained_root: str = ""

    def run_trained(self, program: Program, operands: Mapping[int, Any], cache: dict[Any, Any]) -> Any:
        """Compute it as it will be rounded. A tensor that several ops read is rounded once."""
        values: dict[str, Any] = {}
        for number, (operand, rounder) in enumerate(zip(self.operands, self.rounders, strict=True)):
            x = operands[number]
            name = operand.value if rounder is None else rounder.name
            if type(x) is Rounded:
                x = x.value
            else:
                x = floats_of(x) if rounder is None else _rounded(program, rounder, floats_of(x), cache)
            values.setdefault(name, x)
        if () not in self.computes:
            made = cut(program, self.trained_root, list(values), {}, None, self.root)
            self.computes[()] = Compute(made, None)
        return self.computes[()].forward(*values.values())

    def compute(self, program: Program, given: tuple[Grid | None, ...], target: str | None) -> Compute:
        """What computes it from operands in the form they are given in."""
        found = self.computes.get(given)
        if found is None:
            with self._building:
                found = self.computes.get(given) or self._built(program, given, target)
                self.computes[given] = found
        return found

    def action(self, trace: Trace, forms: tuple[Grid | None, ...]) -> Compute:
        """What computes it from operands in the form they come in."""
        form_of = {self.operands[number].value: form for number, form in zip(self.reading, forms, strict=True)}
        given = tuple(form_of[operand.value] for operand in self.operands)
        return self.compute(trace.held, given, trace.target)

    def _built(self, program: Program, given: tuple[Grid | None, ...], target: str | None) -> Compute:
        names = list(dict.fromkeys(operand.value for operand in self.operands))
        on_grids = {operand.value: grid for operand, grid in zip(self.operands, given, strict=True) if grid is not None}
        made = Compute(cut(program, self.root, names, on_grids, self.out_grid, self.root), target)
        if self.out_grid is not None:
            made.leave_order()
        return made

    def distinct(self, operands: Mapping[int, Any]) -> list[Any]:
        """Each tensor once, in the order in which they are computed with."""
        return [operands[number] for number in self.reading]

    def run_float(self, program: Program, operands: Mapping[int, Any]) -> Any:
        """Compute it in float, as it is before it is converted."""
        given: tuple[Grid | None, ...] = (None,) * len(self.operands)
        compute = self.compute(program, given, None)
        return compute.forward(*(floats_of(x) for x in self.distinct(operands)))

    def run_quantized(self, program: Program, operands: Mapping[int, Any], target: str) -> Any:
        """Compute it on a kernel. Bytes are read as they come; floats are rounded, by the kernel if nobody else reads
        them."""
        direct = self.direct
        if direct is not None:
            levels = []
            for x, grid in zip(
                (operands[0], operands[1]) if len(operands) == 2 else (operands[0],), self.grids, strict=True
            ):
                if type(x) not in CARRIERS or x.grid != grid:
                    break
                levels.append(arrived(x).levels)
            else:
                made = direct(*levels)
                return made if self.out_grid is None else on_grid(made, self.out_grid)
        return self._run_as_given(program, operands, target)

    def _run_as_given(self, program: Program, operands: Mapping[int, Any], target: str) -> Any:
        values: dict[str, Any] = {}
        forms: dict[str, Grid | None] = {}
        for number, (operand, grid) in enumerate(zip(self.operands, self.grids, strict=True)):
            x = operands[number]
            if operand.value in values:
                continue
            comes_as_bytes = grid is not None and type(x) in CARRIERS and x.grid is not None
            if grid is not None and (comes_as_bytes or self.shares_rounding[number]):
                values[operand.value], forms[operand.value] = levels_on(x, grid), grid
            else:
                values[operand.value], forms[operand.value] = float32_of(x), None
        given = tuple(forms[operand.value] for operand in self.operands)
        compute = self.compute(program, given, target)
        if given == self.grids and len(values) == len(self.operands) <= 2 and None not in given:
            self.direct = compute.direct
        made = compute.forward(*values.values())
        return made if self.out_grid is None else on_grid(made, self.out_grid)

    reading: tuple[int, ...] = ()
    """The operands that are computed with: each tensor once, in order."""
    grids_read: tuple[Grid | None, ...] = ()
    """Those of the operands that are computed with."""
    rounds_first: bool = False
    """Whether floats that it reads are rounded by themselves: kernels of convolutions read bytes alone."""
    reads_bytes: bool = False
    """Whether all that it reads is on grids."""
    direct: Any = None
    """What computes it from bytes on its grids, where one or two are all it reads."""
    shares_rounding: tuple[bool, ...] = ()
    """For each operand: whether other ops read the same tensor on the same grid."""


def rounded_once(program: Program, target: str, x: Tensor, cache: dict[Any, Any]) -> Any:
    """A tensor as it is rounded in training; the same for all who read it before it is written to, so that it is observed
    once."""
    key = (target, id(x), x._version)
    if key not in cache:
        cache[key] = (program.root.get_submodule(target)(x), x)
    return cache[key][0]


def _rounded(program: Program, rounder: fx.Node, x: Tensor, cache: dict[Any, Any]) -> Any:
    return rounded_once(program, str(rounder.target), x, cache)


@dataclass(frozen=True, slots=True)
class Rounded:
    """An operand that was rounded in training before the others were there."""

    value: Tensor


def is_put_in(node: fx.Node) -> bool:
    """Whether a node was put in by quantc: it rounds, or for training brings a norm back or follows the mode."""
    if belongs_to_qdq(node):
        return True
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return is_put_in(node.args[0])
    return node.op == "call_module" and str(node.target).startswith((TRAINED, NORMS, MODES))


def behind_put_in(node: fx.Node) -> fx.Node:
    """The node whose value one is that was put in."""
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


__all__ = [
    "CallFacts", "Derived", "Operand", "Path", "Tensor", "Unit", "behind_put_in", "is_put_in", "reach", "rounded_once",
]  # fmt: skip
