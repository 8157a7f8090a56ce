"""`Target`: the lowering half of a backend, as a value.

A backend says what is quantized and how; a target of the same name says what becomes of the program: the function that
lowers it, the file it is saved as, and what must hold of every program before it gets there. quantc's own targets and
those of other packages come through one door, the entry-point group `quantc.targets`:

    [project.entry-points."quantc.targets"]
    npu = "my_npu:TARGET"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import fx

from quantc.errors import InvariantError, PluginError
from quantc.integer.semantics import rows_at
from quantc.ir.program import Program
from quantc.spec.arithmetic import EXACT, Arithmetic
from quantc.support.optional_dependency import extra
from quantc.support.plugin_registry import Registry

OWN_ENDINGS = (
    ".qc",
    ".html",
    ".txt",
    ".json",
    ".dot",
    ".graphml",
    ".npz",
    ".pt",
    ".pt2",
    ".py",
    ".safetensors",
    ".toml",
)
"""Endings of files that mean something else."""
MAX_SHOWN = 8
"""How many broken sites an error names."""


@runtime_checkable
class Artifact(Protocol):
    """What a target with files lowers to. It may be called like the model; `quantc quantize` times it then."""

    def save(self, path: Path) -> None:
        """Write the file."""

    def to_data(self) -> dict[str, Any]:
        """Summary as JSON-compatible data."""
        ...


Faults = Iterable[tuple[fx.Node, str]]


@dataclass(frozen=True, slots=True)
class Invariant:
    """A condition on converted programs. `faults` yields the nodes that break it, each with the reason."""

    name: str
    """As a sentence: `scales are powers of two`."""
    faults: Callable[[Program], Faults]


@dataclass(frozen=True, slots=True)
class Target:
    """Where quantized programs go."""

    name: str
    lower: Callable[..., Any] | str
    """The function that lowers a program, or its place, `module:function`. Options are its keyword-only parameters. One
    that takes `pipeline` runs the passes itself; others are given what these make of the program."""
    suffix: str = ""
    """The ending of the files it writes, with the dot; empty if it writes programs alone."""
    recognizes: Callable[[Path], bool] | None = None
    """Whether a file is one of these, which may be replaced; without it no existing file is."""
    requires: tuple[str, str] | None = None
    """A package that it needs, and the extra of quantc that installs it."""
    in_process: bool = False
    """Whether lowering takes no time to speak of, so that it is done and timed whether or not a file is asked for."""
    arithmetic: Arithmetic = EXACT
    """Rounding, multipliers and accumulators, which the integer form has and is proven by."""
    pipeline: str = ""
    """The passes that bring a converted program there, as text: what `quantc.pipelines.lower(name)` shows."""
    invariants: tuple[Invariant, ...] = ()
    """What holds of every program converted for the backend of this name."""
    summary: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", self.name):
            raise PluginError(f"{self.name!r} is no name of a target", advice="lower case letters, digits, - and _")
        if self.suffix and (not re.fullmatch(r"\.[a-z0-9_]+", self.suffix) or self.suffix in OWN_ENDINGS):
            raise PluginError(
                f"target {self.name} cannot write {self.suffix!r} files",
                where=f"suffix={self.suffix!r}",
                advice="give an ending of its own, with the dot, such as .npu",
            )
        object.__setattr__(self, "invariants", tuple(self.invariants))

    @property
    def function(self) -> Callable[..., Any]:
        """The lowering function. PluginError if it cannot be imported, or takes no program."""
        found = self.lower
        if isinstance(found, str):
            module, _, name = found.partition(":")
            try:
                found = getattr(import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise PluginError(
                    f"target {self.name} has no lowering function: {error}", where=f"lower={self.lower!r}"
                ) from error
        if not callable(found):
            raise PluginError(f"target {self.name} has no lowering function: {found!r} is not callable")
        takes = [row for row in signature(found).parameters.values() if row.kind is not Parameter.KEYWORD_ONLY]
        if not takes or any(row.default is Parameter.empty for row in takes[1:] if row.kind in _NAMED):
            raise PluginError(
                f"target {self.name} cannot be lowered to: {getattr(found, '__qualname__', found)} takes "
                f"{', '.join(row.name for row in takes) or 'nothing'}",
                advice="let it take the program, and options as keywords with defaults",
            )
        return found

    def check_ready(self) -> None:
        """Refuse a target that cannot be lowered to here, before any work is done for it."""
        if self.requires is not None:
            extra(*self.requires, f"qc.lower(..., {self.name!r})")
        _ = self.function

    def check_artifact(self, made: Any) -> None:
        """Refuse what a lowering gave, if it cannot be saved."""
        if self.suffix and not isinstance(made, Artifact):
            missing = [name for name in ("save", "to_data") if not callable(getattr(made, name, None))]
            raise PluginError(
                f"target {self.name} writes {self.suffix} files, and gave a {type(made).__name__} without "
                f"{' and '.join(missing)}",
                advice="see quantc.targets.target.Artifact",
            )


_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _why_not_target(name: str, thing: Any) -> str | None:
    if not isinstance(thing, Target):
        return "it is not a quantc.targets.target.Target"
    return None if thing.name == name else f"the target is named {thing.name!r}, not {name!r}"


TARGETS: Registry[Target] = Registry("target", "targets", "quantc.targets", _why_not_target)


def register_target(target: Target) -> Target:
    """Register a target for this process, without a package."""
    return TARGETS.register(target.name, target)


def suffixes() -> dict[str, str]:
    """Targets by the ending of the files they write. PluginError if two write the same."""
    found: dict[str, str] = {}
    for name, target in TARGETS.usable():
        if target.suffix and (other := found.setdefault(target.suffix, name)) != name:
            raise PluginError(
                f"targets {other} and {name} both write {target.suffix} files",
                where=f"provided by {TARGETS.provider(other)} and {TARGETS.provider(name)}",
                advice="give one of them another ending, or uninstall it",
            )
    return found


def targets_of(program: Program) -> tuple[Target, ...]:
    """Targets that have the names of the quantizers that claimed a program's nodes."""
    claimed = {claim.quantizer for claim in program.plan.claims.rows.values()}
    return tuple(TARGETS[name] for name in sorted(claimed) if name in TARGETS)


def note_arithmetic(program: Program) -> Program:
    """The program, with the arithmetic of its targets in its plan. PluginError if its rows are not where it says."""
    own = {target.name: target.arithmetic for target in targets_of(program) if target.arithmetic != EXACT}
    for arithmetic in own.values():
        if arithmetic.semantics:
            rows_at(arithmetic.semantics)
    program.plan.arithmetic.update(own)
    return program


def check_invariants(program: Program, *others: Target) -> None:
    """InvariantError, naming the sites, if a converted program breaks an invariant of its targets, or of `others`."""
    for target in dict.fromkeys((*targets_of(program), *others)):
        broken = [
            f"{program.describe(node)}: {why} ({each.name})"
            for each in target.invariants
            for node, why in each.faults(program)
        ]
        if broken:
            more = f"; and {len(broken) - MAX_SHOWN} more" if len(broken) > MAX_SHOWN else ""
            raise InvariantError(
                f"{program.name} cannot be run by {target.name}: {broken[0]}",
                where="; ".join(broken[:MAX_SHOWN]) + more,
                advice=f"leave these ops float (config.set_node(..., qc.FLOAT)), or mend the rules of backend {target.name}",
            )
