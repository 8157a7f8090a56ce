"""`Target`: the lowering half of a backend, as a value.

A backend says what is quantized and how; a target of the same name says what becomes of the program: the function that
lowers it, the file it is saved as, and what must hold of every program before it gets there. quantc's own targets and
those of other packages come through one door, the entry-point group `quantc.targets`:

    [project.entry-points."quantc.targets"]
    npu = "my_npu:TARGET"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import fx

from quantc.errors import InvariantError, PluginError, QuantcError
from quantc.integer.semantics import rows_at
from quantc.ir.program import Program, check_program
from quantc.pipeline.failure import node_at_fault
from quantc.spec.arithmetic import EXACT, Arithmetic
from quantc.support.optional_dependency import installed
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
"""Maximum number of broken sites that an error names."""


@runtime_checkable
class Artifact(Protocol):
    """Result of lowering to a target with files. If it can be called like the model, `quantc quantize` times it."""

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

    def broken(self, program: Program, target: str) -> Iterator[str]:
        """The sites of a program that break it, each with the reason. PluginError if it cannot tell."""
        with blamed(f"invariant {self.name!r} of target {target}", program):
            found: Iterable[Any] = self.faults(program)
            for each in found:
                if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], fx.Node)):
                    raise PluginError(
                        f"invariant {self.name!r} of target {target} gives {each!r}",
                        advice="let it yield pairs of a node and the reason, and nothing where a program is as it should be",
                    )
                yield f"{program.describe(each[0])}: {each[1]} ({self.name})"


@contextmanager
def blamed(who: str, program: Program | None = None) -> Iterator[None]:
    """PluginError, naming `who` and the node it was at, for whatever a plugin raises by accident."""
    try:
        yield
    except QuantcError:
        raise
    except Exception as error:
        node = node_at_fault(error) if program is not None else None
        where = program.describe(node) if program is not None and node is not None else None
        raise PluginError(
            f"{who} failed: {type(error).__name__}: {error}", where=where, advice="report it to its author, or mend it"
        ) from error


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of quantized programs."""

    name: str
    lower: Callable[..., Any] | str
    """The function that lowers a program, or its place, `module:function`. Options are its keyword-only parameters. One
    that takes `pipeline` runs the passes itself; others are given what these make of the program."""
    suffix: str = ""
    """The ending of the files it writes, with the dot; empty if it writes programs alone."""
    recognizes: Callable[[Path], bool] | None = None
    """Test whether a file is one of these, which may be replaced; without it no existing file is."""
    requires: tuple[str, str] | None = None
    """A module that it needs, and what `pip install` gets it with: `("npu_sdk", "npu-sdk")`."""
    in_process: bool = False
    """True if lowering takes negligible time: it then runs and is timed even if no file is asked for."""
    arithmetic: Arithmetic = EXACT
    """Rounding, multipliers and accumulators, which the integer form has and is proven by."""
    pipeline: str = ""
    """The passes that bring a converted program there, as text: what `quantc.pipelines.lower(name)` shows."""
    invariants: tuple[Invariant, ...] = ()
    """Invariants of every program converted for the backend of this name."""
    summary: str = ""

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
            raise PluginError(f"{self.name!r} is no name of a target", advice="lower case letters, digits, - and _")
        if self.suffix and (not re.fullmatch(r"\.[a-z0-9_]+", str(self.suffix)) or self.suffix in OWN_ENDINGS):
            raise PluginError(
                f"target {self.name} cannot write {self.suffix!r} files",
                where=f"suffix={self.suffix!r}",
                advice="give an ending of its own, with the dot, such as .npu",
            )
        given: Any = self.invariants
        object.__setattr__(self, "invariants", (given,) if isinstance(given, Invariant | str) else tuple(given))
        for field, is_right, expected in self._fields():
            if not is_right:
                raise PluginError(
                    f"target {self.name} has the {field} {getattr(self, field)!r}",
                    where=f"Target({self.name!r}, {field}=...)",
                    advice=f"give {expected}",
                )

    def _fields(self) -> Iterator[tuple[str, bool, str]]:
        """Fields, whether they hold what they should, and what that is."""
        held: Any = self  # fields may hold anything yet
        pair = held.requires
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) and part for part in pair)
        yield "requires", pair is None or is_pair, 'a module and what pip installs it by: ("npu_sdk", "npu-sdk")'
        are_invariants = all(isinstance(each, Invariant) and callable(each.faults) for each in held.invariants)
        yield "invariants", are_invariants, "Invariant(name, function of a program) for each"
        yield "arithmetic", isinstance(held.arithmetic, Arithmetic), "a quantc.spec.arithmetic.Arithmetic"
        yield "pipeline", isinstance(held.pipeline, str), "pipeline text"
        yield "recognizes", held.recognizes is None or callable(held.recognizes), "a function of a path"

    @property
    def function(self) -> Callable[..., Any]:
        """The lowering function. PluginError if it cannot be imported, or takes more than the program and options."""
        found = self._import_function() if isinstance(self.lower, str) else self.lower
        if not callable(found):
            raise PluginError(f"target {self.name} has no lowering function: {found!r} is not callable")
        try:
            rows = [*signature(found).parameters.values()]
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"target {self.name} cannot be lowered to: {error}", advice="let a function of Python take the program"
            ) from error
        positional = [row for row in rows if row.kind in _POSITIONAL]
        demanded = [row for row in rows if row.default is Parameter.empty and row.kind in _NAMED]
        if not positional or demanded not in ([], positional[:1]):
            raise PluginError(
                f"target {self.name} cannot be lowered to: {getattr(found, '__qualname__', found)} takes "
                f"{', '.join(row.name for row in rows) or 'nothing'}",
                advice="let it take the program, and options as keywords with defaults",
            )
        return found

    def _import_function(self) -> Any:
        module, colon, name = str(self.lower).partition(":")
        where = f"lower={self.lower!r}"
        if not (module and colon and name):
            raise PluginError(
                f"target {self.name} has no lowering function", where=where, advice="write its place as module:function"
            )
        try:
            return attrgetter(name)(import_module(module))
        except Exception as error:
            raise PluginError(
                f"target {self.name} has no lowering function: {type(error).__name__}: {error}", where=where
            ) from error

    def check_ready(self) -> None:
        """Refuse a target that cannot be lowered to here, before any work is done for it."""
        if self.requires is not None:
            with blamed(f"importing {self.requires[0]}, which target {self.name} requires,"):
                installed(*self.requires, f"qc.lower(..., {self.name!r})")
        _ = self.function

    def run(self, program: Any, options: Mapping[str, Any]) -> Any:
        """Lower a program. A target from outside gets a copy, and whatever it raises by accident is a PluginError."""
        if is_own(self.name):
            made = self.function(program, **options)
        else:
            check_program(program, "lower", "qc.convert(prepared), or take result.program of qc.quantize(...),")
            with blamed(f"lowering to {self.name}", program):
                made = self.function(program.clone(), **options)
        self.check_artifact(made)
        return made

    def is_own_file(self, path: Path) -> bool:
        """True if a file is one of these; False for a file that the target cannot read."""
        try:
            return self.recognizes is not None and bool(self.recognizes(path))
        except Exception:  # noqa: BLE001 - such as a UnicodeDecodeError of what reads text
            return False

    def data_of(self, made: Any) -> dict[str, Any]:
        """An artifact's own data; empty if it has none. PluginError if it is not JSON."""
        if not callable(getattr(made, "to_data", None)):
            return {}
        with blamed(f"to_data() of what {self.name} lowers to"):
            data = made.to_data()
            json.dumps(data)
        if not isinstance(data, dict):
            raise PluginError(
                f"to_data() of what {self.name} lowers to gives a {type(data).__name__}", advice="give a dict"
            )
        return data

    def save(self, made: Any, path: Path) -> None:
        """Write an artifact. PluginError if it raises, or writes nothing."""
        with blamed(f"saving what {self.name} lowers to as {path}"):
            made.save(path)
        if not path.exists():
            raise PluginError(
                f"what {self.name} lowers to was saved, and there is no {path}", advice="let save write it"
            )

    def check_artifact(self, made: Any) -> None:
        """Refuse what a lowering gave, if it cannot be saved."""
        if self.suffix and not isinstance(made, Artifact):
            missing = [name for name in ("save", "to_data") if not callable(getattr(made, name, None))]
            raise PluginError(
                f"target {self.name} writes {self.suffix} files, and gave a {type(made).__name__} without "
                f"{' and '.join(missing)}",
                advice="see quantc.targets.target.Artifact",
            )


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
OWN = "quantc"
"""The distribution that quantc's own targets come from."""


def is_own(name: str) -> bool:
    """True for the targets of quantc itself."""
    return TARGETS.provider(name) == OWN


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
        broken = [fault for each in target.invariants for fault in each.broken(program, target.name)]
        if broken:
            more = f"; and {len(broken) - MAX_SHOWN} more" if len(broken) > MAX_SHOWN else ""
            raise InvariantError(
                f"{program.name} cannot be run by {target.name}: {broken[0]}",
                where="; ".join(broken[:MAX_SHOWN]) + more,
                advice=f"leave these ops float (config.set_node(..., qc.FLOAT)), or mend the rules of backend {target.name}",
            )
