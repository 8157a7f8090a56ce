"""Passes and pipelines: values that can be printed, compared, changed and run.

A pass is a frozen value whose fields are its options. A pipeline is a tuple of passes with a text form that parses
back: `canonicalize,fuse,annotate{backend=x86}`. The pipeline has no switches: whatever observes a run (verification,
timing, dumps ...) is a hook, see `quantc.hooks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from quantc.errors import PassError, PipelineError, QuantcError, RefusedError, suggest
from quantc.ir.program import LogEntry, Program, Stage
from quantc.pipeline.base_pass import Outcome, Pass, Preserves
from quantc.pipeline.failure import failure_text, node_at_fault
from quantc.pipeline.pipeline_parser import parse_passes
from quantc.pipeline.stage_order import check_order, check_start, first_needs, left_to_run


class Hook:
    """Callbacks of a pipeline run. Subclass and override the methods you need."""

    def before(self, program: Program, pass_: Pass) -> None:
        """`pass_` is about to run."""

    def after(self, program: Program, pass_: Pass, changed: bool) -> None:
        """`pass_` ran; the log has its entry and the program its new stage. Raising here fails the pass."""

    def failed(self, program: Program, pass_: Pass, error: PassError) -> None:
        """`pass_` or a hook raised. Information for the user can be added with `error.add_note`."""


def hooks_of(given: Hook | Iterable[Hook]) -> tuple[Hook, ...]:
    """Hooks, or one, as a tuple. PipelineError if something else is among them."""
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    for each in found:
        if not isinstance(each, Hook):
            raise PipelineError(
                f"{each!r} is not a hook"
                if not isinstance(given, Hook)
                else "one hook was given, and a list is wanted",
                where=f"hooks={given!r}",
                advice="give instances of subclasses of quantc.hooks.Hook: hooks=[Timing()]",
            )
    return found


@dataclass(frozen=True)
class Pipeline:
    """An ordered tuple of passes; an invalid order is an error when it is built, not when it runs."""

    passes: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", tuple(self.passes))
        check_order(self.passes)

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Parse the text form. Named pipelines in it are expanded."""
        return Pipeline(parse_passes(text, Pipeline))

    @staticmethod
    def of(given: Pipeline | str) -> Pipeline:
        """A pipeline, given as one or as text. PipelineError for anything else."""
        if isinstance(given, Pipeline):
            return given
        if not isinstance(given, str):
            raise PipelineError(
                f"{given!r} is no pipeline", where="pipeline=...", advice="give a quantc.Pipeline, or its text"
            )
        return Pipeline.parse(given)

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
        """This pipeline followed by `steps`."""
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

    def left_for(self, program: Program) -> Pipeline:
        """Without what leads to the stage that a program has reached already."""
        return Pipeline(tuple(left_to_run(self.passes, program)))

    def _find(self, name: str) -> list[int]:
        found = [index for index, pass_ in enumerate(self.passes) if pass_.name == name]
        if not found:
            advice = suggest(name, self.names, noun="passes in it")
            raise PipelineError(f"unknown pass {name!r} in this pipeline", where=str(self), advice=advice)
        return found

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, program: Program, hooks: Sequence[Hook] = ()) -> Program:
        """Run every pass on `program` itself, and return it.

        Nothing is copied: after an error the program is as the failing pass left it. `run_on_copy` leaves its argument
        unchanged.
        """
        check_start(self.passes, program)
        hooks = hooks_of(hooks)
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
        """The error for a failure in a pass or in a hook."""
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
            f"pass {pass_.name} failed: {type(cause).__name__}: {failure_text(cause)}",
            where=place,
            advice="the Reproducer hook writes the program and the pipeline that fail to a folder",
        )
        error.__cause__ = cause
        return error


def _run_one(pass_: Pass, program: Program, hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        with _told_as(hook, "before", pass_):
            hook.before(program, pass_)
    start = perf_counter()
    outcome = pass_.run(program)
    seconds = perf_counter() - start
    notes, judgments = (outcome.notes, outcome.judgments) if isinstance(outcome, Outcome) else ((), ())
    program.log.append(LogEntry(str(pass_), seconds, bool(outcome), notes, judgments))
    program.stage = max(program.stage, pass_.gives or program.stage)
    for hook in hooks:
        with _told_as(hook, "after", pass_):
            hook.after(program, pass_, bool(outcome))


@contextmanager
def _told_as(hook: Hook, moment: str, pass_: Pass) -> Iterator[None]:
    """PassError that names the hook for what it raises by accident; what it finds is an error of the pass."""
    try:
        yield
    except QuantcError:
        raise
    except Exception as error:
        raise PassError(
            f"hook {type(hook).__name__} failed {moment} pass {pass_.name}: {type(error).__name__}: {error}",
            advice="mend the hook, or run without it",
        ) from error


def _tell_failed(hooks: Iterable[Hook], program: Program, pass_: Pass, error: PassError) -> None:
    for hook in hooks:
        try:
            hook.failed(program, pass_, error)
        except Exception as second:  # noqa: BLE001 - it must not hide the first error, which is raised right after
            error.add_note(f"the hook {type(hook).__name__} failed too: {type(second).__name__}: {second}")


def _flat(steps: Iterable[Pass | Pipeline]) -> tuple[Pass, ...]:
    return tuple(pass_ for step in steps for pass_ in (step.passes if isinstance(step, Pipeline) else (step,)))


__all__ = ["Hook", "Outcome", "Pass", "Pipeline", "Preserves", "hooks_of"]
