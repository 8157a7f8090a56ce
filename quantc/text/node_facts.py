"""Facts about a node beside its call: its origin, its decision, the rule behind that, and its scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantc.errors import UnknownNameError, suggest
from quantc.ir.plan import Group, spec_of
from quantc.ir.program import Program
from quantc.spec.spec import name_of

FLOAT = "float"


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of annotation for one node, and the grid of its output. Unknown fields are empty."""

    verdict: str = ""
    """`quantized`, `propagated` or `float`; empty before annotation, and for constants and inputs."""
    rule: str = ""
    quantizer: str = ""
    technique: str = ""
    reason: str = ""
    """The reason why it stays float."""
    spec: str = ""
    """The spec of its output."""
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()

    @property
    def scale_text(self) -> str:
        """`0.0123`, or `0.001..0.02 (64)` where there is one for each channel."""
        if len(self.scale) < 2:
            return "".join(f"{scale:.4g}" for scale in self.scale)
        return f"{min(self.scale):.4g}..{max(self.scale):.4g} ({len(self.scale)})"

    def to_data(self) -> dict[str, Any]:
        """As JSON-compatible data: one scale is a number, several are a list."""
        one = len(self.scale) == 1
        return {
            "verdict": self.verdict,
            "rule": self.rule or None,
            "quantizer": self.quantizer or None,
            "technique": self.technique or None,
            "reason": self.reason or None,
            "spec": self.spec or None,
            "scale": (self.scale[0] if one else list(self.scale)) if self.scale else None,
            "zero_point": (self.zero_point[0] if one else list(self.zero_point)) if self.zero_point else None,
        }


class Decisions:
    """The decisions of a program's plan, by node."""

    def __init__(self, program: Program) -> None:
        self.plan = program.plan
        self.groups: dict[fx.Node, Group] = {}
        known = {(path, node.name): node for path, graph in program.graphs() for node in graph.nodes}
        for group in self.plan.groups:
            for site in (*group.places, *group.values):
                node = known.get((site.graph, site.node))
                if site.operand is None and node is not None:
                    self.groups.setdefault(node, group)

    def of(self, node: fx.Node) -> Decision | None:
        """The decision about a node; None if the plan says nothing of it."""
        claim, left = self.plan.claims.get(node), self.plan.left_float.get(node)
        group = self.groups.get(node)
        if claim is None and left is None and group is None:
            return None
        spec, scale, zero_point = "", tuple[float, ...](), tuple[int, ...]()
        if group is not None:
            qparams = self.plan.qparams.get(group.name)
            spec = name_of(spec_of(group, qparams))
            if qparams is not None:
                scale = tuple(qparams.scale.double().flatten().tolist())
                zero_point = tuple(int(value) for value in qparams.zero_point.flatten().tolist())
        return Decision(
            verdict=FLOAT if left is not None else "" if claim is None else claim.part.value,
            rule="" if claim is None else claim.rule,
            quantizer="" if claim is None else claim.quantizer,
            technique="" if claim is None else str(claim.timing),
            reason=left or "",
            spec=spec,
            scale=scale,
            zero_point=zero_point,
        )


def select(program: Program, only: str | None) -> frozenset[fx.Node] | None:
    """The nodes of a module, by its path, or from one node to another, `first..last`; None for all of them.

    Constants and inputs that the nodes read belong to them. UnknownNameError if nothing has the name.
    """
    if only is None:
        return None
    if not isinstance(only, str):
        raise UnknownNameError(
            f"unknown module or range {only!r}", advice='give the path of a module, or two nodes as "first..last"'
        )
    if not only:
        raise UnknownNameError("unknown module or range ''", advice="leave only= out for the whole program")
    first, dots, last = only.partition("..")
    found = set(nodes_between(program, first, last) if dots else _of_module(program, only))
    if not found:
        paths = {origin.module_path for origin in program.origins.rows.values() if origin.module_path}
        raise UnknownNameError(f"unknown module or range {only!r}", advice=suggest(only, paths, noun="modules"))
    return frozenset(found | {read for node in found for read in node.all_input_nodes if read.op != "call_function"})


def _of_module(program: Program, path: str) -> Iterator[fx.Node]:
    for _, graph in program.graphs():
        for node in graph.nodes:
            origin = program.origins.get(node)
            where = "" if origin is None else origin.module_path
            if where == path or where.startswith(f"{path}.") or (not where and node.name == path):
                yield node


def nodes_between(program: Program, first: str, last: str) -> Iterator[fx.Node]:
    """The nodes of one graph from one to another, both included."""
    begin, end = program.node(first), program.node(last)
    if begin.graph is not end.graph or end < begin:
        raise UnknownNameError(
            f"unknown range {first!r}..{last!r}: {last} does not come after {first} in one graph",
            advice="name two nodes of one graph in their order",
        )
    node = begin
    while node is not end:
        yield node
        node = node.next
    yield end
