"""Passes and pipelines: values that can be printed, compared, changed and run.

A pass is a frozen value whose fields are its options. A pipeline is a tuple of passes with a text form that reads
back: `canonicalize,fuse,annotate{backend=x86}`. The pipeline has no switches: whatever watches a run (verifying,
timing, dumping ...) is a hook, see `quantc.hooks`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import cleandoc, isabstract
from time import perf_counter
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import fx

from quantc.errors import PassError, PipelineError, RefusedError, suggest
from quantc.ir.program import LogEntry, Program, Stage
from quantc.pipeline.failure import node_at_fault, told
from quantc.pipeline.stage_order import check_order, check_start, first_needs
from quantc.support.option_text import spell

KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Preserves(Enum):
    """What a pass promises about the program's numbers. `quantc.hooks.Guard` holds it to that."""

    EXACTLY = "every output keeps its bits"
    CLOSELY = "outputs may differ by rounding, as when a multiplication is folded into a weight"
    NOTHING = "outputs change, as when tensors are quantized"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did: whether it changed the program, and what it has to say in the log."""

    changed: bool
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.changed


class Pass(BaseModel, ABC):
    """One step of a pipeline: a frozen value whose fields are its options.

    Its docstring is its page in docs/passes.md. Running it twice must change nothing the second time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: ClassVar[str]
    """The name in pipeline text, in kebab-case and starting with a verb: `fold-constants`."""
    needs: ClassVar[Stage] = Stage.CANONICAL
    """The stage a program must have reached."""
    gives: ClassVar[Stage | None] = None
    """The stage it has reached afterwards."""
    before: ClassVar[Stage | None] = None
    """The stage it must not have reached yet."""
    preserves: ClassVar[Preserves] = Preserves.EXACTLY
    """What it promises about the numbers."""

    @abstractmethod
    def run(self, program: Program) -> bool | Outcome:
        """Change `program` in place; say truthfully whether anything changed (Outcome: and add notes to the log)."""

    def for_config(self, config: Any) -> Pass:
        """The pass as a `QuantConfig` asks for it, where it is a backend's transform."""
        return self

    def left_whole(self, program: Program) -> dict[fx.Node, str]:
        """The nodes that it is for and will leave as they are, each with the reason."""
        return {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if isabstract(cls):
            return
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not KEBAB.fullmatch(name):
            raise PipelineError(
                f"the pass {cls.__qualname__} is named {name!r}",
                where=cls.__module__,
                advice='give the class a kebab-case name: name: ClassVar[str] = "fold-constants"',
            )
        if cls.before is not None and cls.before <= cls.needs:
            raise PipelineError(
                f"the pass {name} can never run: it needs {cls.needs.label} and must run before {cls.before.label}",
                where=cls.__module__,
                advice="correct its `needs` or its `before`",
            )

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of the options as pipeline text spells them."""
        return tuple(field.replace("_", "-") for field in cls.model_fields)

    @classmethod
    def summary(cls) -> str:
        """The first sentence or line of its docstring."""
        return cleandoc(cls.__doc__ or "").partition("\n")[0]

    def __str__(self) -> str:
        """The text form; options that have their default are left out."""
        fields = type(self).model_fields
        given = [
            name
            for name, field in fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        if not given:
            return self.name
        values = self.model_dump(mode="json", include=set(given))
        texts = []
        for name in given:
            value = values[name]
            if isinstance(getattr(self, name), set | frozenset):
                value = sorted(value, key=spell)
            texts.append(f"{name.replace('_', '-')}={spell(value)}")
        return f"{self.name}{{{' '.join(texts)}}}"


class Hook:
    """What a pipeline tells those who watch it. Derive from this and write the methods you need."""

    def before(self, program: Program, pass_: Pass) -> None:
        """`pass_` is about to run."""

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        """`pass_` ran; the log has its entry and the program its new stage. Raising here fails the pass."""

    def failed(self, program: Program, pass_: Pass, error: PassError) -> None:
        """`pass_` or a hook raised. What is worth telling the user can be added with `error.add_note`."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in an order that makes sense; a wrong order is an error when it is built, not when it runs."""

    passes: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        check_order(self.passes)

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Read the text form. Named pipelines in it are expanded."""
        from quantc.pipeline.pipeline_parser import parse

        return parse(text)

    def __str__(self) -> str:
        return ",".join(str(pass_) for pass_ in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(pass_.name for pass_ in self.passes)

    @property
    def needs(self) -> Stage:
        """The stage a program must have reached before the first pass."""
        return max((pass_.needs for pass_ in first_needs(self.passes)), default=Stage.CAPTURED)

    # -- other pipelines from this one -----------------------------------------------------------------------

    def then(self, *steps: Pass | Pipeline) -> Pipeline:
        """This one, then `steps`."""
        return Pipeline((*self.passes, *_flat(steps)))

    def without(self, *names: str) -> Pipeline:
        """Without the passes of these names."""
        for name in names:
            self._find(name)
        return Pipeline(tuple(pass_ for pass_ in self.passes if pass_.name not in names))

    def before(self, name: str, *steps: Pass | Pipeline) -> Pipeline:
        """With `steps` before the first pass called `name`."""
        at = self._find(name)[0]
        return Pipeline((*self.passes[:at], *_flat(steps), *self.passes[at:]))

    def after(self, name: str, *steps: Pass | Pipeline) -> Pipeline:
        """With `steps` after the last pass called `name`."""
        at = self._find(name)[-1] + 1
        return Pipeline((*self.passes[:at], *_flat(steps), *self.passes[at:]))

    def replace(self, name: str, *steps: Pass | Pipeline) -> Pipeline:
        """With `steps` in the place of each pass called `name`."""
        self._find(name)
        new = _flat(steps)
        return Pipeline(tuple(item for pass_ in self.passes for item in (new if pass_.name == name else (pass_,))))

    def _find(self, name: str) -> list[int]:
        found = [index for index, pass_ in enumerate(self.passes) if pass_.name == name]
        if not found:
            advice = suggest(name, self.names, noun="passes in it")
            raise PipelineError(f"there is no pass {name!r} in this pipeline", where=str(self), advice=advice)
        return found

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, program: Program, hooks: Sequence[Hook] = ()) -> Program:
        """Run every pass on `program` itself, and give it back.

        Nothing is copied: after an error the program is as the failing pass left it. `run_on_copy` leaves the
        one it is given alone.
        """
        check_start(self.passes, program)
        for index, pass_ in enumerate(self.passes):
            try:
                _run_one(pass_, program, hooks)
            except RefusedError as refusal:
                refusal.add_note(f"while running {pass_.name}, pass {index + 1} of {len(self.passes)}")
                raise
            except Exception as cause:
                error = self._failure(program, index, cause)
                _tell_failed(hooks, program, pass_, error)
                if error is cause:
                    raise
                raise error from cause
        return program

    def run_on_copy(self, program: Program, hooks: Sequence[Hook] = ()) -> Program:
        """Run on a copy, made once at the start."""
        return self.run(program.clone(), hooks)

    def _failure(self, program: Program, index: int, cause: Exception) -> PassError:
        """The error to raise for what went wrong in a pass or in a hook that watched it."""
        pass_ = self.passes[index]
        ran = ", ".join(str(earlier) for earlier in self.passes[:index]) or "nothing"
        place = f"pass {index + 1} of {len(self.passes)}, {pass_}; ran before it: {ran}"
        if isinstance(cause, PassError):
            cause.where = f"{cause.where}; {place}" if cause.where else place
            return cause
        node = node_at_fault(cause)
        if node is not None:
            place = f"{place}; at node {program.describe(node)}"
        error = PassError(
            f"pass {pass_.name} failed: {type(cause).__name__}: {told(cause)}",
            where=place,
            advice="the Reproducer hook writes the program and the pipeline that fail to a folder",
        )
        error.__cause__ = cause
        return error


def _run_one(pass_: Pass, program: Program, hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        hook.before(program, pass_)
    start = perf_counter()
    outcome = pass_.run(program)
    seconds = perf_counter() - start
    notes = outcome.notes if isinstance(outcome, Outcome) else ()
    program.log.append(LogEntry(str(pass_), seconds, bool(outcome), notes))
    program.stage = max(program.stage, pass_.gives or program.stage)
    for hook in hooks:
        hook.after(program, pass_, bool(outcome))


def _tell_failed(hooks: Iterable[Hook], program: Program, pass_: Pass, error: PassError) -> None:
    for hook in hooks:
        try:
            hook.failed(program, pass_, error)
        except Exception as second:  # noqa: BLE001 - it must not hide the first error, which is raised right after
            error.add_note(f"the hook {type(hook).__name__} failed too: {type(second).__name__}: {second}")


def _flat(steps: Iterable[Pass | Pipeline]) -> tuple[Pass, ...]:
    return tuple(pass_ for step in steps for pass_ in (step.passes if isinstance(step, Pipeline) else (step,)))
