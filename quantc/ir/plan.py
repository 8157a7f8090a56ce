"""The plan of a quantization: the decisions about a program's tensors, kept beside its graph.

Quantizers write claims and decisions, `share` resolves them into groups, calibration fills in the statistics, and
`quantize` carries the plan out. Until then no node of the graph is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from torch import fx

from quantc.ir.decisions import Derived, Fixed, Quantize, TensorOutcome
from quantc.ir.sites import NodeTable, Site
from quantc.spec.arithmetic import Arithmetic
from quantc.spec.formats import PerChannel, Timing
from quantc.spec.spec import INT32_BIAS, QuantSpec

if TYPE_CHECKING:
    from torch import Tensor

    from quantc.spec.halves import Halves
    from quantc.spec.numerics import QParams
    from quantc.spec.observation import Observation


class Part(StrEnum):
    """The effect of a rule on a node."""

    QUANTIZED = "quantized"
    """Computes on quantized tensors."""
    PROPAGATED = "propagated"
    """Propagates quantized tensors, because it reads one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The rule and quantizer that have taken a node, and the root node of the match."""

    quantizer: str
    rule: str
    root: str
    part: Part = Part.QUANTIZED
    timing: Timing = Timing.STATIC
    """The technique: when the scales of its inputs are found, and whether it computes on integers."""

    def __str__(self) -> str:
        how = "" if self.timing is Timing.STATIC else f" ({self.timing})"
        return f"{self.part} by {self.rule} of {self.quantizer}{how}"


class Source(StrEnum):
    """The origin of a group's qparams."""

    DATA = "data"
    """Calibration."""
    CONSTANTS = "constants"
    """The tensors themselves, as for weights."""
    GIVEN = "given"
    """Fixed beforehand."""
    DERIVED = "derived"
    """The qparams of other groups."""
    RUN_TIME = "run-time"
    """The tensor at hand, each time the program runs."""


@dataclass(frozen=True, slots=True)
class Group:
    """An equivalence class of sites that share one scale and zero point."""

    name: str
    """The text of its first site; the key of its statistics."""
    outcome: Quantize | Fixed | Derived
    values: tuple[Site, ...]
    """The observed tensors, as output sites; each once, in program order."""
    places: tuple[Site, ...]
    """Every output and operand site in the group."""
    source: Source = Source.DATA

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}, {', '.join(str(place) for place in self.places)}"


class Annotates(Protocol):
    """The author of a plan: a `quantc.Quantizer`, as far as the IR knows it."""

    @property
    def name(self) -> str: ...
    def transforms(self) -> tuple[Any, ...]: ...
    def annotate(self, annotator: Any) -> None: ...
    def validate(self, program: Any) -> None: ...
    def supported_operators(self) -> tuple[str, ...]: ...
    def explain(self, program: Any, node: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class AbsentQuantizer:
    """A quantizer of which only the name is known, as it is not installed where its plan was read."""

    name: str
    backends: tuple[str, ...] = ()
    """The backends to look up, in order of precedence; none if it is not made of backends."""


@dataclass
class Plan:
    """The decisions so far; empty for a program that has not been annotated."""

    quantizer: Annotates | None = None
    """The quantizer that annotated the program; it explains what was left out."""
    config: Any = None
    """The user's `QuantConfig`, or None."""
    claims: NodeTable[Claim] = field(default_factory=NodeTable[Claim])
    left_float: NodeTable[str] = field(default_factory=NodeTable[str])
    """The reason why a node was left float, where annotation knows it."""
    lowered: NodeTable[str] = field(default_factory=NodeTable[str])
    """In the integer form: the node of the Q/DQ form, by name, that a node has the value of."""
    made_for: NodeTable[str] = field(default_factory=NodeTable[str])
    """In a program that was legalized for a target: the op, by the name it had, that a node was made for; empty for none.
    A node without a row stands for itself."""
    outcomes: dict[Site, TensorOutcome] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    statistics: dict[str, Observation] = field(default_factory=dict)
    """By group name."""
    batches: int = 0
    """The number of batches in the statistics."""
    collected: dict[str, Halves] = field(default_factory=dict)
    """Statistics for passes that fit weights, by name and tensor: `gram relu:out0`."""
    fitted: dict[Site, Tensor] = field(default_factory=dict)
    """By operand site: the float values that a constant takes when the plan is carried out, fitted to the data by
    `qc.recover`. The program keeps its own, and so computes what the model does."""
    fitted_to: dict[Site, str] = field(default_factory=dict)
    """By operand site: the digest of the constant that `fitted` holds for. None in files from before it was written."""
    qparams: dict[str, QParams] = field(default_factory=dict)
    """By group name, once `quantize` has run."""
    instruction_sets: dict[str, str] = field(default_factory=dict)
    """The instruction set whose accumulation the numbers are for, by the name of the claiming quantizer. Kept here, and
    not with the quantizer alone, because a file cannot hold every quantizer, and numbers must not depend on that."""
    arithmetic: dict[str, Arithmetic] = field(default_factory=dict)
    """The arithmetic of the target, by the name of the claiming quantizer; none where it is exact."""
    absent: AbsentQuantizer | None = None
    """The quantizer, where the plan was read without it."""

    @property
    def is_empty(self) -> bool:
        return not self.outcomes

    @property
    def says_nothing(self) -> bool:
        """True if nothing has been decided, not even to leave everything float."""
        return self.quantizer is None and not (self.outcomes or self.claims.rows or self.left_float.rows)

    def decides_like(self, other: Plan) -> bool:
        """True if two plans for one graph make the same decisions."""
        mine, theirs = (self.claims.rows, self.left_float.rows), (other.claims.rows, other.left_float.rows)
        return self.outcomes == other.outcomes and mine == theirs

    @property
    def tables(self) -> tuple[NodeTable[Claim], NodeTable[str], NodeTable[str], NodeTable[str]]:
        """The node tables of the plan."""
        return self.claims, self.left_float, self.lowered, self.made_for

    def renamed(self, nodes: Mapping[fx.Node, fx.Node]) -> Plan:
        """The plan for a copy of the graph; `nodes` maps old nodes to new ones. The statistics objects are shared."""
        return Plan(
            self.quantizer,
            self.config,
            self.claims.renamed(nodes),
            self.left_float.renamed(nodes),
            self.lowered.renamed(nodes),
            self.made_for.renamed(nodes),
            dict(self.outcomes),
            self.groups,
            dict(self.statistics),
            self.batches,
            dict(self.collected),
            dict(self.fitted),
            dict(self.fitted_to),
            dict(self.qparams),
            dict(self.instruction_sets),
            dict(self.arithmetic),
            self.absent,
        )

    def __str__(self) -> str:
        lines = [f"claim {node.name}: {claim}" for node, claim in self.claims.rows.items()]
        lines += [f"float {node.name}: {reason}" for node, reason in self.left_float.rows.items()]
        lines += [f"place {site}: {outcome}" for site, outcome in self.outcomes.items()]
        lines += [f"group {group}" for group in self.groups]
        return "\n".join(lines)


def spec_of(group: Group, qparams: QParams | None = None) -> QuantSpec:
    """The spec of a group. Derived groups are per channel if their qparams are."""
    if not isinstance(group.outcome, Derived):
        return group.outcome.spec
    by_channel = qparams is not None and qparams.scale.dim() > 0
    return INT32_BIAS.but(granularity=PerChannel(axis=0)) if by_channel else INT32_BIAS
