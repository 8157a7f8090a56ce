"""Kernel placements: typed tables of the kernel that runs each op of a program, and the kernel modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx, nn

from quantc.ir.sites import NodeTable

StandIn: TypeAlias = str | tuple[str, ...]
"""The node of the integer form, by name, whose value a node computes; several for one that computes them together."""


class PlacedModule(nn.Module):
    """A module that runs an op of a program. It has no effect but its result, unless it writes over an operand."""

    @property
    def description(self) -> str:
        """One-line description of the kernel, as the program's text shows it."""
        return type(self).__name__

    @property
    def written_over(self) -> int | None:
        """The operand, by its place, whose memory the result is written into; None if that is new."""
        return None


@dataclass(frozen=True, slots=True)
class Placed:
    """One op of the integer form, and the kernel that runs it."""

    node: str
    op: str
    kernel: str
    """Empty where it runs as it is written."""
    reason: str
    """The reason why no kernel took the op, or why kernels earlier in order refused it."""
    chosen: str = ""
    """The basis of the choice among several kernels: "table", "measured", "remembered", "saved"; or "whole" where this
    kernel is slower alone and faster in the whole program."""
    work: str = ""
    """The kernel's work (kind, size, channels), where there was a choice."""
    microseconds: dict[str, float] = field(default_factory=dict)
    """The time of each kernel that could have been taken; of the nearest shape, if chosen by the table."""

    @property
    def why(self) -> str:
        """Reason and times, on one line."""
        times = ", ".join(f"{name} {time:.0f} µs" for name, time in self.microseconds.items())
        return "; ".join(part for part in (self.reason, f"{self.chosen}: {times}" if times else "") if part)

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.node} ({self.op}): {self.kernel or 'as written'}{why}"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A choice among the kernels that could run an op."""

    taken: str
    """By name."""
    families: tuple[tuple[str, str], ...]
    """Name and family of each kernel, in the order of the cost table."""


@dataclass
class Placements:
    """The kernel of each op of a program; empty before `place-kernels`."""

    ops: dict[str, Placed] = field(default_factory=dict)
    """By the name of the op in the integer form, `branch/conv` in a nested graph; in the order of the program."""
    choices: dict[str, KernelChoice] = field(default_factory=dict)
    """Likewise, of every kernel that was taken, those whose work another has taken over included."""
    runs: NodeTable[tuple[str, ...]] = field(default_factory=NodeTable[tuple[str, ...]])
    """The ops that a node runs, by their names in `ops`."""
    stand_ins: NodeTable[StandIn] = field(default_factory=NodeTable[StandIn])
    highest: NodeTable[int] = field(default_factory=NodeTable[int])
    """The highest level that an 8-bit result can have, where an op was replaced that bounded it."""
    owns_results: bool = False
    """True if no result is a constant or a view of one."""

    @property
    def tables(self) -> tuple[NodeTable[tuple[str, ...]], NodeTable[StandIn], NodeTable[int]]:
        """The tables keyed by node."""
        return self.runs, self.stand_ins, self.highest

    @property
    def placed(self) -> tuple[Placed, ...]:
        """The ops that are still in the program, each with its kernel."""
        left = {key for keys in self.runs.rows.values() for key in keys}
        return tuple(row for key, row in self.ops.items() if key in left)

    def keys(self, node: fx.Node) -> tuple[str, ...]:
        """The ops that a node runs."""
        return self.runs.get(node) or ()

    def stands_for(self, node: fx.Node) -> StandIn:
        """The node of the integer form whose value a node computes: that of its own name, unless it replaced one."""
        found = self.stand_ins.get(node)
        return node.name if found is None else found

    def renamed(self, nodes: Mapping[fx.Node, fx.Node]) -> Placements:
        """The same for a copy of the graph; `nodes` maps old nodes to new ones."""
        return Placements(
            dict(self.ops),
            dict(self.choices),
            self.runs.renamed(nodes),
            self.stand_ins.renamed(nodes),
            self.highest.renamed(nodes),
            self.owns_results,
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"runs {row}" for row in self.placed)
        if self.owns_results:
            yield "results are memory of their own"
