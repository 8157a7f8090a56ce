"""Delegation report: each quantized op runs on integers in a delegate, in float in a delegate, or outside."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import is_op, op_name, ops_in
from quantc.ir.op_row import Family
from quantc.ir.plan import Claim
from quantc.ir.program import Program
from quantc.spec.formats import Timing
from quantc.support.terminal import plain_rows
from quantc.targets.executorch.partitioning import is_implicit, name_of

RECURRENT = ops_in(Family.RECURRENT)
MEANS = ("mean", "adaptive_avg_pool2d")
"""Ops that `legalize-xnnpack` may write as a pool."""
MAX_ROWS = 40
"""Maximum number of ops that the text shows."""


class RunsOn(StrEnum):
    """The executor of an op: a delegate, ExecuTorch's own kernels, or none if the op was removed."""

    DELEGATE = "delegate"
    """In a delegate, on integers."""
    DELEGATE_FLOAT = "delegate, in float"
    KERNEL = "own kernel"
    """On a kernel of ExecuTorch's own that reads integers: the rows of an embedding."""
    PORTABLE = "portable"
    """On ExecuTorch's own kernels, in float."""
    GONE = "removed"
    """Without effect."""


ON_INTEGERS = (RunsOn.DELEGATE, RunsOn.KERNEL, RunsOn.GONE)


@dataclass(frozen=True, slots=True)
class DelegationRow:
    """One quantized op of the program."""

    node: str
    op: str
    rule: str
    module: str
    place: RunsOn
    why: str = ""
    """The reason why no delegate computes it on integers."""

    @property
    def is_delegated(self) -> bool:
        return self.place in (RunsOn.DELEGATE, RunsOn.GONE)

    @property
    def is_float(self) -> bool:
        return self.place not in ON_INTEGERS


@dataclass(frozen=True)
class Delegation:
    """Quantized ops of a program, and what runs each. Prints as a table."""

    program: str
    rows: tuple[DelegationRow, ...]
    delegates: int
    """Number of delegated subgraphs."""
    others: tuple[str, ...] = ()
    """The ops that run on ExecuTorch's own kernels, quantized or not, by name, each once."""
    sizes: str = ""
    """The sizes that are dynamic in the program and fixed here, as text; empty if there are none."""

    @property
    def taken(self) -> tuple[DelegationRow, ...]:
        return tuple(row for row in self.rows if row.is_delegated)

    @property
    def fallen_back(self) -> tuple[DelegationRow, ...]:
        """Ops that are computed in float."""
        return tuple(row for row in self.rows if row.is_float)

    @property
    def fraction(self) -> float:
        """Fraction of quantized ops that delegates compute on integers."""
        return len(self.taken) / len(self.rows) if self.rows else 1.0

    def row(self, node: str) -> DelegationRow | None:
        return next((row for row in self.rows if row.node == node), None)

    @property
    def headline(self) -> str:
        pieces = "1 delegate" if self.delegates == 1 else f"{self.delegates} delegates"
        return f"{self.program}: {len(self.taken)} of {len(self.rows)} quantized ops on integers in {pieces}"

    def to_data(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "delegates": self.delegates,
            "taken": len(self.taken),
            "fraction": self.fraction,
            "portable": list(self.others),
            "sizes": self.sizes,
            "ops": [asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """Fallbacks come first."""
        ordered = sorted(self.rows, key=lambda row: not row.is_float)
        cells = [(row.node, row.op, row.rule, row.place.value, row.why) for row in ordered[:MAX_ROWS]]
        more = [f"  … and {len(ordered) - MAX_ROWS} more"] if len(ordered) > MAX_ROWS else []
        table = plain_rows(("node", "op", "rule", "runs in", "why"), cells) if cells else []
        others = [f"  on ExecuTorch's own kernels: {', '.join(self.others)}"] if self.others else []
        sizes = [f"  {self.sizes}; for other sizes give largest="] if self.sizes else []
        return "\n".join([self.headline, *sizes, *others, *table, *more])


# -- reading it from what was lowered ------------------------------------------------------------------------------


def delegation_of(program: Program, legal: Program, manager: Any, reasons: Mapping[str, str]) -> Delegation:
    """Delegation of a program's quantized ops, read from the lowered graphs; `legal` is the program as they were given
    it."""
    top = manager.exported_program().graph_module
    inside = {id(graph): graph for graph in _delegate_graphs(top)}
    places: dict[str, set[RunsOn]] = {}
    for graph in inside.values():
        for name, place in _places(graph):
            places.setdefault(name, set()).add(place)
    others: dict[str, None] = {}
    for node in _outside(top):
        others.setdefault(_short(node))
        if name := name_of(node):
            on_integers = "embedding_byte" in str(node.target)
            places.setdefault(name, set()).add(RunsOn.KERNEL if on_integers else RunsOn.PORTABLE)
    pools = {node.name for node in legal.nodes() if node.target is torch.ops.aten.avg_pool2d.default}
    rows = tuple(_rows(program, places, reasons, pools))
    return Delegation(program.name, rows, len(inside), tuple(others))


def misread(manager: Any) -> str:
    """First dequantize op that a delegate fuses into an op although it has other users; empty if there is none.

    Those other users would read integers as floats.
    """
    for graph in _delegate_graphs(manager.exported_program().graph_module):
        for node in graph.nodes:
            is_part = is_scaling(node) and is_implicit(node) and "dequantize" in str(node.target)
            if is_part and any(user.op == "output" for user in node.users):
                return name_of(node) or node.name
    return ""


def _rows(
    program: Program, places: Mapping[str, set[RunsOn]], reasons: Mapping[str, str], pools: Container[str]
) -> Iterator[DelegationRow]:
    for node, claim in program.plan.claims.rows.items():
        if node.op != "call_function" or "getitem" in str(node.target):
            continue
        place = _worst(places.get(node.name, {RunsOn.GONE}))
        why = "" if place in ON_INTEGERS else _why(program, node, claim, reasons, pools)
        origin = program.origins.get(node)
        yield DelegationRow(node.name, op_name(node), claim.rule, origin.module_path if origin else "", place, why)


def _worst(places: Iterable[RunsOn]) -> RunsOn:
    """An op that became several is where the worst of them is."""
    order = (RunsOn.PORTABLE, RunsOn.DELEGATE_FLOAT, RunsOn.KERNEL, RunsOn.DELEGATE, RunsOn.GONE)
    return min(places, key=order.index)


def _why(program: Program, node: fx.Node, claim: Claim, reasons: Mapping[str, str], pools: Container[str]) -> str:
    """The partitioner's own reason, or else an evident one."""
    if is_op(node, *RECURRENT):
        return "its products with the input are taken; its state is float, and so is what is made of it"
    if claim.timing is Timing.WEIGHT_ONLY:
        return "XNNPACK multiplies floats only with weights of linear layers, and these with a scale for each channel"
    if is_op(node, *MEANS) and node.name in pools:
        return "a pool in float: the int8 mean is wrong for a batch that is larger than those before it"
    for name in (node.name, claim.root):
        if name in reasons:
            return reasons[name].rstrip(".")
    near = {other.name: other for other in (*node.all_input_nodes, *node.users)}
    told = [f"{name}: {reasons[name].rstrip('.')}" for name in near if name in reasons]
    if told:
        return told[0]
    floats = [source.name for source in node.all_input_nodes if not is_scaling(source) and not is_constant(source)]
    if floats:
        return f"{floats[0]}, which it reads, comes as float"
    readers = [user.name for user in node.users if not is_scaling(user)]
    return f"{readers[0]} reads it as float" if readers else "no partitioner has a rule for it in this form"


def _delegate_graphs(module: Any) -> Iterator[fx.Graph]:
    """The graphs that delegates run, those in branches and loops too."""
    for part in module.modules():
        original = getattr(part, "original_module", None)
        if original is not None:
            yield original.graph


def _outside(module: Any) -> Iterator[fx.Node]:
    """The ops that no delegate runs."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and not _is_plumbing(node):
                    yield node


def _is_plumbing(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in ("executorch_call_delegate", "getitem", "higher_order"))


def _short(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _places(graph: fx.Graph) -> Iterator[tuple[str, RunsOn]]:
    """The ops of a delegate's graph, each with its arithmetic: integer if all its inputs are, or its weight is."""
    on_integers: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or is_scaling(node):
            continue
        read = [source for source in node.all_input_nodes if source.op == "call_function"]
        levels = [source for source in read if is_scaling(source) and is_implicit(source)]
        has_weight = any("per_channel" in str(source.target) for source in levels)
        if read and (has_weight or all(source in on_integers or source in levels for source in read)):
            on_integers.add(node)
        yield name_of(node), RunsOn.DELEGATE if node in on_integers else RunsOn.DELEGATE_FLOAT


WORDS = ("quantize_per_", "quantize_affine", "choose_qparams")


def is_scaling(node: fx.Node) -> bool:
    """True for quantize, dequantize and choose-qparams ops, in any dialect."""
    if node.op != "call_function":
        return False
    if "getitem" in str(node.target):
        return is_scaling(node.all_input_nodes[0])
    return any(word in str(node.target) for word in WORDS)


def is_constant(node: fx.Node) -> bool:
    return node.op in ("get_attr", "placeholder")
