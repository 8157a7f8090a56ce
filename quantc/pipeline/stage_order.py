"""Validation of pass order by the stages that passes need, give, and must precede."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantc.errors import PipelineError
from quantc.ir.program import Program, Stage
from quantc.pipeline.base_pass import Pass
from quantc.pipeline.registry import PASSES


def check_order(passes: Sequence[Pass]) -> None:
    """Raise PipelineError, naming two passes and a remedy, if no program could go through all of these."""
    for index, pass_ in enumerate(passes):
        _check_before(passes[:index], pass_)
        _check_needs(passes[:index], pass_, passes[index + 1 :])


def check_start(passes: Sequence[Pass], program: Program) -> None:
    """Raise PipelineError if a program is not at the stage the passes need."""
    where = f"pipeline {','.join(str(pass_) for pass_ in passes)}"
    for pass_ in first_needs(passes):
        if pass_.needs > program.stage:
            raise PipelineError(
                f"{pass_.name} needs a program that is {pass_.needs.label}, but {program.name} is only "
                f"{program.stage.label}",
                where=where,
                advice=_how_to_reach(pass_.needs),
            )
    for pass_ in passes:
        if pass_.before is not None and program.stage >= pass_.before:
            raise PipelineError(
                f"{pass_.name} must run before a program is {pass_.before.label}, but {program.name} is already "
                f"{program.stage.label}",
                where=where,
                advice=f"run it on an earlier program, or leave it out: pipeline.without({pass_.name!r})",
            )


def left_to_run(passes: Sequence[Pass], program: Program) -> Sequence[Pass]:
    """The passes without those that lead to a stage which the program has reached already."""
    done = [index for index, pass_ in enumerate(passes) if pass_.gives is not None and pass_.gives <= program.stage]
    return passes[done[-1] + 1 :] if done else passes


def first_needs(passes: Sequence[Pass]) -> Iterator[Pass]:
    """The passes whose required stage no earlier pass gives: the program must have reached it."""
    reached = Stage.CAPTURED
    for pass_ in passes:
        if pass_.needs > reached:
            yield pass_
        reached = max(reached, pass_.gives or reached)


def _check_before(earlier: Sequence[Pass], pass_: Pass) -> None:
    if pass_.before is None:
        return
    for other in earlier:
        if other.gives is not None and other.gives >= pass_.before:
            raise PipelineError(
                f"{pass_.name} must run before a program is {pass_.before.label}, but {other.name}, which makes it "
                f"{other.gives.label}, comes first",
                where=_order(earlier, pass_),
                advice=f"put {pass_.name} before {other.name}",
            )


def _check_needs(earlier: Sequence[Pass], pass_: Pass, later: Sequence[Pass]) -> None:
    if any(other.gives is not None and other.gives >= pass_.needs for other in earlier):
        return
    for other in later:
        if other.gives == pass_.needs:
            raise PipelineError(
                f"{pass_.name} needs a program that is {pass_.needs.label}, but {other.name}, which makes it so, comes "
                "after it",
                where=_order(earlier, pass_, *later),
                advice=f"put {other.name} before {pass_.name}",
            )
    for other in earlier:
        if other.before is not None and other.before <= pass_.needs:
            raise PipelineError(
                f"{pass_.name} needs a program that is {pass_.needs.label}, which {other.name} before it does not "
                "allow, and no pass between them makes it so",
                where=_order(earlier, pass_),
                advice=f"between {other.name} and {pass_.name}, {_how_to_reach(pass_.needs)}",
            )


def _order(earlier: Sequence[Pass], *rest: Pass) -> str:
    return f"pipeline {','.join(pass_.name for pass_ in (*earlier, *rest))}"


def _how_to_reach(stage: Stage) -> str:
    givers = [name for name, kind in PASSES.usable() if kind.gives == stage]
    if not givers:
        return f"run a pass that makes it {stage.label} first"
    return f"run {' or '.join(givers)} first"
