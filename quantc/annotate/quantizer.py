"""Quantizers decide how a program is quantized. A `Backend` is data; `TableQuantizer` applies its rule table.

The role of a name that a rule binds:

    "act", "weight", ...   the backend's `roles` give a spec, or fixed qparams
    "like x"               the qparams of `x`
    "pass"                 propagated: the rule applies where `x` comes quantized
    "act?" (for `out`)     on demand: quantized if a value-moving follower asks for it, else float
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quantc.annotate.annotator import Annotator
from quantc.annotate.backend import LIKE, ON_DEMAND, PASS, Backend
from quantc.annotate.table_annotation import TableAnnotation
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError
from quantc.ir.decisions import Fixed, Quantize, TensorOutcome
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.ir.sites import Site
from quantc.spec.spec import QuantSpec, name_of

if TYPE_CHECKING:
    from quantc.patterns.explain_match import Explanation
    from quantc.pipeline.pipeline import Pass


PT2E = ("transform_for_annotation", "annotate", "validate")
"""The methods of quantizers of torch's PT2 export flow."""


@runtime_checkable
class Quantizer(Protocol):
    """Protocol of classes that decide the quantization of a program's tensors."""

    @property
    def name(self) -> str:
        """The name in reports and in pipeline text."""
        ...

    def transforms(self) -> tuple[Pass, ...]:
        """Passes to run before annotating, such as decomposing attention."""
        ...

    def annotate(self, annotator: Annotator) -> None:
        """Claim nodes and decide their operands and outputs."""
        ...

    def validate(self, program: Program) -> None:
        """Raise an AnnotationError if the plan asks for something that cannot be run."""
        ...

    def supported_operators(self) -> tuple[str, ...]:
        """The ops this quantizer knows, by name."""
        ...

    def explain(self, program: Program, node: str) -> Explanation:
        """The rules that could have taken a node, with the reason why each did or did not."""
        ...


@dataclass(frozen=True)
class TableQuantizer:
    """Annotates a program by a backend's rule table: the usual quantizer."""

    backend: Backend

    @property
    def name(self) -> str:
        return self.backend.name

    def transforms(self) -> tuple[Pass, ...]:
        return self.backend.before

    def finishing(self) -> tuple[Pass, ...]:
        return self.backend.after

    def annotate(self, annotator: Annotator) -> None:
        TableAnnotation(self.backend, annotator).run()

    def validate(self, program: Program) -> None:
        """Raise AnnotationError unless the backend can run every spec in the plan."""
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
        config = program.plan.config.resolve(program) if program.plan.config is not None else None
        admission = TableAnnotation(self.backend, Annotator(program, config, Plan())).admission
        return self.backend.table.explain(program, node, admission)


@dataclass(frozen=True)
class Quantizers:
    """A composition of quantizers in order of precedence: nodes claimed by one are hidden from those after it."""

    members: tuple[Quantizer, ...]
    name: str = field(default="")

    def __post_init__(self) -> None:
        members = [part for member in self.members for part in members_of(member)]
        object.__setattr__(self, "members", tuple(members))
        object.__setattr__(self, "name", self.name or "+".join(member.name for member in members))
        if not members:
            raise AnnotationError("no quantizers to compose", advice="give at least one")
        twice = [name for name, count in Counter(member.name for member in members).items() if count > 1]
        if twice:
            raise AnnotationError(
                f"more than one of the quantizers is named {twice[0]!r}",
                advice="rename one: claims go by the name of their quantizer",
            )

    def transforms(self) -> tuple[Pass, ...]:
        return tuple(dict.fromkeys(step for member in self.members for step in member.transforms()))

    def finishing(self) -> tuple[Pass, ...]:
        return tuple(dict.fromkeys(step for member in self.members for step in finishing_passes(member)))

    def annotate(self, annotator: Annotator) -> None:
        for member in self.members:
            member.annotate(Annotator(annotator.program, annotator.config))

    def validate(self, program: Program) -> None:
        """Let each member validate the sites it decided."""
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
    """The members of a composition; the quantizer itself if it is none."""
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


def finishing_passes(quantizer: Quantizer | None) -> tuple[Pass, ...]:
    """The passes a quantizer adds at the end of convert: the result of its method `finishing`, if it has one."""
    method = getattr(quantizer, "finishing", None)
    return tuple(method()) if method is not None else ()


def mode_config(quantizer: Quantizer, mode: str) -> QuantConfig:
    """The config of a mode: the spec that the backends have for it, everywhere."""
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
    """The instruction set of each member, by its name: from its backend, or from itself."""
    members = () if quantizer is None else members_of(quantizer)
    holders = {member.name: getattr(member, "backend", member) for member in members}
    return {name: str(getattr(holder, "instruction_set", "")) for name, holder in holders.items()}


def target_of(given: Any) -> str:
    """The name of the target that programs of a backend or quantizer are lowered to."""
    holder = getattr(given, "backend", given)
    return str(getattr(holder, "target", "") or given.name)


def quantizer_of(given: Any) -> Quantizer:
    """The quantizer for a backend's name, a Backend, a Quantizer, or several of these."""
    from quantc.pipeline.registry import BACKENDS

    if isinstance(given, str):
        return quantizer_of(BACKENDS[given])
    if isinstance(given, Backend):
        return TableQuantizer(given)
    if isinstance(given, Iterable):
        return Quantizers(tuple(quantizer_of(member) for member in given))
    if isinstance(given, Quantizer):
        return given
    if all(callable(getattr(given, member, None)) for member in PT2E):
        raise AnnotationError(
            f"{type(given).__name__} annotates exported graphs, as torchao's and ExecuTorch's quantizers do, "
            "and qc.prepare takes a quantizer of programs",
            where=f"backend={given!r}",
            advice="go by the flow for it: prepare_pt2e(torch.export.export(model, example_inputs).module(), quantizer) and "
            "convert_pt2e of quantc.flows.pt2e; or name a backend: `quantc backends` lists them",
        )
    members = ("name", "transforms", "annotate", "validate", "supported_operators", "explain")
    missing = [member for member in members if not hasattr(given, member)]
    raise AnnotationError(
        f"{given!r} is not a quantizer: it lacks {', '.join(missing)}",
        advice="give a backend's name, a Backend, or an object with these members",
    )


__all__ = [
    "LIKE",
    "ON_DEMAND",
    "PASS",
    "Backend",
    "Quantizer",
    "Quantizers",
    "TableQuantizer",
    "finishing_passes",
    "instruction_sets_of",
    "members_of",
    "mode_config",
    "quantizer_of",
    "target_of",
]
