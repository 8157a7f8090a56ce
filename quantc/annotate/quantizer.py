"""Quantizers decide how a program is quantized. A `Backend` is data; `TableQuantizer` reads its table.

Roles say what a rule makes of a name it binds:

    "act", "weight", ...   what the backend's `roles` say: a spec, or fixed qparams
    "like x"               the scale of `x`
    "pass"                 whatever `x` comes as: the rule applies where it comes quantized
    "act?" (for `out`)     quantized if a rule that follows and moves it asks for it, else float
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quantc.annotate.annotator import Annotator
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError, PatternError, suggest
from quantc.ir.decisions import Fixed, Quantize, TensorOutcome
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.ir.sites import Site
from quantc.spec.capability import Capability, refusal
from quantc.spec.instruction_sets import instruction_set
from quantc.spec.spec import QuantSpec, name_of

if TYPE_CHECKING:
    from quantc.patterns.explain_match import Explanation
    from quantc.patterns.table import RuleTable
    from quantc.pipeline.pipeline import Pass

PASS = "pass"
LIKE = "like "
ON_DEMAND = "?"


@runtime_checkable
class Quantizer(Protocol):
    """Decides what becomes of a program's tensors. Anything with these members serves."""

    @property
    def name(self) -> str:
        """What it is called in reports and in pipeline text."""
        ...

    def transforms(self) -> tuple[Pass, ...]:
        """Passes to run before annotating, such as taking attention apart."""
        ...

    def annotate(self, annotator: Annotator) -> None:
        """Claim nodes and decide their operands and outputs."""
        ...

    def validate(self, program: Program) -> None:
        """Raise an AnnotationError if the program asks for something that cannot be run."""
        ...

    def supported_operators(self) -> tuple[str, ...]:
        """The ops this quantizer knows, by name."""
        ...

    def explain(self, program: Program, node: str) -> Explanation:
        """Which rules could have taken a node, and why they did or did not."""
        ...


@dataclass(frozen=True)
class Backend:
    """What a target can run, as data: a rule table, what its roles are, and which specs its kernels take."""

    name: str
    table: RuleTable
    roles: Mapping[str, QuantSpec | Quantize | Fixed]
    takes: tuple[Capability, ...] = ()
    """Which specs a config may ask for; without any, those of `roles` alone."""
    modes: Mapping[str, QuantSpec] = field(default_factory=dict)
    """What a mode of `qc.quantize` asks of every op: a spec for "dynamic", and one for "weight-only"."""
    before: tuple[Pass, ...] = ()
    """Passes to run before annotating."""
    after: tuple[Pass, ...] = ()
    """Passes to run at the end of convert."""
    summary: str = ""
    instruction_set: str = ""
    """Whose sums the numbers are for, by name (`quantc.instruction_sets`); empty if that is not known."""

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
        """What a role stands for."""
        found = self.roles[role.removesuffix(ON_DEMAND)]
        return found if isinstance(found, Quantize | Fixed) else Quantize(found)

    @cached_property
    def capabilities(self) -> tuple[Capability, ...]:
        """Which specs can be run."""
        if self.takes:
            return self.takes
        outcomes = (self.outcome(role) for role in self.roles)
        return tuple(dict.fromkeys(Capability.of(outcome.spec) for outcome in outcomes))

    def why_not(self, spec: QuantSpec) -> str | None:
        """Why the backend cannot run a spec; None if it can."""
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


@dataclass(frozen=True)
class TableQuantizer:
    """Annotates a program by a backend's table: the quantizer of nearly everyone."""

    backend: Backend

    @property
    def name(self) -> str:
        return self.backend.name

    def transforms(self) -> tuple[Pass, ...]:
        return self.backend.before

    def finishing(self) -> tuple[Pass, ...]:
        return self.backend.after

    def annotate(self, annotator: Annotator) -> None:
        from quantc.annotate.table_annotation import TableAnnotation

        TableAnnotation(self.backend, annotator).run()

    def validate(self, program: Program) -> None:
        """Every spec in the plan must be one the backend can run."""
        for site, outcome in program.plan.outcomes.items():
            if not isinstance(outcome, Quantize | Fixed):
                continue
            reason = self.backend.why_not(outcome.spec)
            if reason is not None:
                raise AnnotationError(
                    f"backend {self.name!r} cannot run {name_of(outcome.spec)}: {reason}",
                    where=str(site),
                    advice="choose another spec in the config, or FLOAT",
                )

    def supported_operators(self) -> tuple[str, ...]:
        from quantc.ir.dialect import target_name

        return tuple(sorted({target_name(target) for rule in self.backend.table for target in rule.compiled.targets}))

    def explain(self, program: Program, node: str) -> Explanation:
        from quantc.annotate.table_annotation import TableAnnotation

        config = program.plan.config.resolve(program) if program.plan.config is not None else None
        admission = TableAnnotation(self.backend, Annotator(program, config, Plan())).admission
        return self.backend.table.explain(program, node, admission)


@dataclass(frozen=True)
class Quantizers:
    """Several quantizers, the first has the first choice: what it claims the others do not see."""

    members: tuple[Quantizer, ...]
    name: str = field(default="")

    def __post_init__(self) -> None:
        members = [part for member in self.members for part in members_of(member)]
        object.__setattr__(self, "members", tuple(members))
        object.__setattr__(self, "name", self.name or "+".join(member.name for member in members))
        if not members:
            raise AnnotationError("there are no quantizers to compose", advice="give at least one")
        twice = [name for name, count in Counter(member.name for member in members).items() if count > 1]
        if twice:
            raise AnnotationError(
                f"more than one of the quantizers is named {twice[0]!r}",
                advice="rename one: claims go by the name of their quantizer",
            )

    def transforms(self) -> tuple[Pass, ...]:
        return tuple(dict.fromkeys(step for member in self.members for step in member.transforms()))

    def finishing(self) -> tuple[Pass, ...]:
        return tuple(dict.fromkeys(step for member in self.members for step in finishing(member)))

    def annotate(self, annotator: Annotator) -> None:
        for member in self.members:
            member.annotate(Annotator(annotator.program, annotator.config))

    def validate(self, program: Program) -> None:
        """Each member checks the places it decided."""
        for member in self.members:
            own = replace(program.plan, outcomes=_decided_by(member.name, program))
            program_of_member = replace(program, plan=own)
            member.validate(program_of_member)

    def supported_operators(self) -> tuple[str, ...]:
        return tuple(sorted({op for member in self.members for op in member.supported_operators()}))

    def explain(self, program: Program, node: str) -> Explanation:
        explained = [member.explain(program, node) for member in self.members]
        return next((found for found in explained if found.matched), explained[0])


def members_of(member: Quantizer | None) -> tuple[Quantizer, ...]:
    """The quantizers that one is made of; itself, if it is made of no others."""
    if member is None:
        return ()
    return member.members if isinstance(member, Quantizers) else (member,)


def _decided_by(name: str, program: Program) -> dict[Site, TensorOutcome]:
    from quantc.ir.site_index import Places

    places = Places(program)
    claims = program.plan.claims
    return {
        site: outcome
        for site, outcome in program.plan.outcomes.items()
        if (claim := claims.get(places.node(site))) is not None and claim.quantizer == name
    }


def finishing(quantizer: Quantizer | None) -> tuple[Pass, ...]:
    """The passes a quantizer wants at the end of convert: what its method `finishing` gives, if it has one."""
    method = getattr(quantizer, "finishing", None)
    return tuple(method()) if method is not None else ()


def mode_config(quantizer: Quantizer, mode: str) -> QuantConfig:
    """What a mode asks for, as a config: the spec that the backends have for it, everywhere."""
    specs: dict[QuantSpec, str] = {}
    for member in members_of(quantizer):
        modes = getattr(getattr(member, "backend", member), "modes", {})
        if mode not in modes:
            raise AnnotationError(
                f"{member.name} has no mode {mode!r}",
                where=f"mode={mode!r}",
                advice=f"its modes are {', '.join(('static', *modes))}; a config asks for single ops, if it takes them: "
                "QuantConfig().set(path, spec)",
            )
        specs[modes[mode]] = member.name
    if len(specs) > 1:
        raise AnnotationError(
            f"{quantizer.name} do not agree on what mode {mode!r} is: {', '.join(map(name_of, specs))}",
            where=f"mode={mode!r}",
            advice="say it in a config: QuantConfig().set_all(spec)",
        )
    return QuantConfig().set_all(next(iter(specs)))


def instruction_sets_of(quantizer: Quantizer | None) -> dict[str, str]:
    """For which instruction set each quantizer of a composition is, by its name: as its backend says, or itself."""
    members = () if quantizer is None else members_of(quantizer)
    holders = {member.name: getattr(member, "backend", member) for member in members}
    return {name: str(getattr(holder, "instruction_set", "")) for name, holder in holders.items()}


def quantizer_of(given: Any) -> Quantizer:
    """The quantizer a user means: by a backend's name, a Backend, a Quantizer, or several of these."""
    from quantc.pipeline.registry import BACKENDS

    if isinstance(given, str):
        return quantizer_of(BACKENDS[given])
    if isinstance(given, Backend):
        return TableQuantizer(given)
    if isinstance(given, Iterable):
        return Quantizers(tuple(quantizer_of(member) for member in given))
    if isinstance(given, Quantizer):
        return given
    members = ("name", "transforms", "annotate", "validate", "supported_operators", "explain")
    missing = [member for member in members if not hasattr(given, member)]
    raise AnnotationError(
        f"{given!r} is not a quantizer: it lacks {', '.join(missing)}",
        advice="give a backend's name, a Backend, or an object with these members",
    )
