"""A `Backend`: what a target can run, as data.

Roles say what a rule makes of a name it binds:

    "act", "weight", ...   what the backend's `roles` say: a spec, or fixed qparams
    "like x"               the scale of `x`
    "pass"                 whatever `x` comes as: the rule applies where it comes quantized
    "act?" (for `out`)     quantized if a rule that follows and moves it asks for it, else float
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from quantc.errors import AnnotationError, PatternError, suggest
from quantc.ir.decisions import Fixed, Quantize
from quantc.patterns.table import RuleTable
from quantc.pipeline.base_pass import Pass
from quantc.spec.capability import Capability, refusal
from quantc.spec.instruction_sets import instruction_set
from quantc.spec.spec import QuantSpec

PASS = "pass"
LIKE = "like "
ON_DEMAND = "?"


@dataclass(frozen=True)
class Backend:
    """The capabilities of a target, as data: a rule table, the spec of each role, and the specs its kernels accept."""

    name: str
    table: RuleTable
    roles: Mapping[str, QuantSpec | Quantize | Fixed]
    takes: tuple[Capability, ...] = ()
    """The specs that a config may request; if empty, those of `roles` alone."""
    modes: Mapping[str, QuantSpec] = field(default_factory=dict)
    """The spec that a mode of `qc.quantize` requests for every op: one for "dynamic", and one for "weight-only"."""
    before: tuple[Pass, ...] = ()
    """Passes to run before annotating."""
    after: tuple[Pass, ...] = ()
    """Passes to run at the end of convert."""
    summary: str = ""
    instruction_set: str = ""
    """The instruction set whose accumulation the numbers are for (`quantc.spec.instruction_sets`); empty if unknown."""
    target: str = ""
    """The target that its programs are lowered to; empty for that of its own name."""

    def __post_init__(self) -> None:
        if self.instruction_set:
            instruction_set(self.instruction_set)
        object.__setattr__(self, "roles", {name: _outcome(use) for name, use in self.roles.items()})
        object.__setattr__(self, "before", tuple(self.before))
        object.__setattr__(self, "after", tuple(self.after))
        object.__setattr__(self, "takes", tuple(self.takes))
        for rule in self.table:
            for name, role in rule.roles.items():
                self._check_role(rule.name, name, role, set(rule.roles))

    def _check_role(self, rule: str, name: str, role: str, names: set[str]) -> None:
        if role == PASS or (role.startswith(LIKE) and role.removeprefix(LIKE) in names - {name}):
            return
        plain = role.removesuffix(ON_DEMAND) if name == "out" else role
        if plain not in self.roles:
            known = [*self.roles, PASS, *(f"{LIKE}{other}" for other in sorted(names - {name}))]
            raise PatternError(
                f"rule {rule!r} of backend {self.name!r} gives {name!r} the role {role!r}, which it does not have",
                advice=suggest(role, known, noun="roles"),
            )

    def outcome(self, role: str) -> Quantize | Fixed:
        """The quantization of a role."""
        found = self.roles[role.removesuffix(ON_DEMAND)]
        return found if isinstance(found, Quantize | Fixed) else Quantize(found)

    @cached_property
    def capabilities(self) -> tuple[Capability, ...]:
        """The specs that can be run."""
        if self.takes:
            return self.takes
        outcomes = (self.outcome(role) for role in self.roles)
        return tuple(dict.fromkeys(Capability.of(outcome.spec) for outcome in outcomes))

    def why_not(self, spec: QuantSpec) -> str | None:
        """The reason why the backend cannot run a spec; None if it can."""
        return refusal(self.capabilities, spec)

    def but(self, **roles: QuantSpec | Quantize | Fixed) -> Backend:
        """The same backend with some roles changed: `X86.but(act=UINT8.but(observe="minmax"))`."""
        unknown = sorted(set(roles) - set(self.roles))
        if unknown:
            advice = suggest(unknown[0], self.roles, noun="roles")
            raise AnnotationError(f"backend {self.name!r} has no role {unknown[0]!r}", advice=advice)
        return replace(self, roles={**self.roles, **roles})

    def __str__(self) -> str:
        return f"{self.name}: {len(self.table)} rules"


def _outcome(use: QuantSpec | Quantize | Fixed) -> Quantize | Fixed:
    return Quantize(use) if isinstance(use, QuantSpec) else use
