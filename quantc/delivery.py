"""What `quantc quantize` leaves behind: the program, what it was lowered to, a report, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from quantc.bench.race import EAGER, Forward, quietly_on_one_thread, speed, take_turns
from quantc.errors import QuantcError
from quantc.program import Program
from quantc.quantize_job import Done
from quantc.report import Speed
from quantc.targets import ARTIFACTS, TARGETS, artifact_of, check_extra, lower
from quantc.whole_file import whole_file

IN_PROCESS = ("x86", "qnnpack")
"""Targets that take no time to lower for, so that their speed is always measured."""
ROUNDS = 9
Say = Callable[[str], None]


@dataclass(frozen=True)
class Delivered:
    """Where everything went. `done` has the speed in its report."""

    done: Done
    artifact: Any = None
    """What the program was lowered to; None where it was not."""
    why_not: str = ""
    """Why it was not lowered, or its speed not measured."""
    files: tuple[tuple[str, Path], ...] = ()
    """What was written: what it is, and where."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether another runtime runs the artifact: what it took of the program is worth telling."""
        return self.artifact is not None and any(artifact_of(path) is not None for _, path in self.files)

    def to_data(self) -> dict[str, Any]:
        return {
            **self.done.to_data(),
            "artifact": None if self.artifact is None else self.artifact.to_data(),
            "not_lowered": self.why_not or None,
            "files": {what: str(path) for what, path in self.files},
        }


def check_out(out: Path | None) -> None:
    """Refuse what cannot be written, before the work is done."""
    if out is not None and (target := artifact_of(out)) is not None:
        check_extra(target)
    if out is not None and out.suffix == ".html":
        raise QuantcError(
            f"{out} would hold the report, and no program",
            where=f"--out {out}",
            advice="name the program: with --out model.qc the report is written to model.html",
        )


def deliver(done: Done, out: Path | None, say: Say) -> Delivered:
    """Lower, measure, write. A file whose name says what it is to be lowered to must be so; otherwise what cannot be
    lowered is told."""
    asked = None if out is None else artifact_of(out)
    target = asked or done.result.report.backend
    artifact, why_not = None, ""
    if asked is not None or target in IN_PROCESS or (out is not None and target in TARGETS):
        try:
            say(f"lower for {target} ...")
            check_extra(target)
            artifact = lower(done.result.program, target)
        except QuantcError as error:
            if asked is not None:
                raise
            why_not = f"not lowered for {target}: {error.what}"
    elif out is not None:
        why_not = f"not lowered: there is no target {target!r}"
    if artifact is not None:
        say("time ...")
        done, why_not = _timed(done, artifact, target)
    delivered = Delivered(done, artifact, why_not)
    return delivered if out is None else _written(delivered, out, target)


def _written(delivered: Delivered, out: Path, target: str) -> Delivered:
    """Beside each other, under one name: the program, the artifact and the report."""
    done, artifact = delivered.done, delivered.artifact
    is_artifact = artifact_of(out) is not None
    program = out.with_suffix(".qc") if is_artifact else out
    files = [("program", program)]
    out.parent.mkdir(parents=True, exist_ok=True)
    done.result.save(program)
    if artifact is not None:
        suffixes = {name: suffix for suffix, name in ARTIFACTS.items()}
        place = out if is_artifact else program.with_suffix(suffixes.get(target, f".{target}.qc"))
        artifact.save(place)
        files.append(("artifact", place))
    page = program.with_suffix(".html")
    with whole_file(page) as draft:
        draft.write_text(done.to_html(), encoding="utf-8")
    return replace(delivered, files=(*files, ("report", page)))


def _timed(done: Done, artifact: Any, target: str) -> tuple[Done, str]:
    """The time of a call of the float program, and of what the quantized one was lowered to, in turns."""
    captured = done.result.captured
    if captured.example_inputs is None:
        return done, "speed not measured: there are no example inputs"
    steps = {EAGER: _call(captured, captured.module), target: _call(captured, artifact)}
    try:
        with quietly_on_one_thread():
            spent = take_turns(steps, (), ROUNDS)
    except QuantcError as error:  # such as a runtime that is not installed: the file can be written all the same
        return done, f"speed not measured: {error.what}"
    found = Speed(target, min(spent[EAGER]) * 1e3, min(spent[target]) * 1e3, speed(spent[EAGER], spent[target]))
    result = replace(done.result, report=replace(done.result.report, speed=found))
    return replace(done, result=result), ""


def _call(captured: Program, model: Callable[..., Any]) -> Forward:
    args, kwargs = pytree.tree_unflatten(list(captured.example_inputs or ()), captured.signature.in_spec)
    return lambda: model(*args, **kwargs)
