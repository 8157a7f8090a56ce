"""Outputs of `quantc quantize`: the program, its lowered artifact, a report, and timings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from quantc.annotate.quantizer import target_of
from quantc.bench.float_runtime import FloatRun, in_float
from quantc.bench.race import EAGER, Forward, quietly_on_one_thread, take_turns
from quantc.cli.run_quantize import Done
from quantc.errors import QuantcError
from quantc.files.atomic_file import write_text
from quantc.files.endings import check_ending
from quantc.files.output_paths import KINDS, Output, check_outputs
from quantc.inspect.report import Speed
from quantc.ir.program import Program
from quantc.support.terminal import Screen
from quantc.targets.target import TARGETS, Target, blamed, suffixes
from quantc.verbs.lower import artifact_of, lower

ROUNDS = 9
Say = Callable[[str], None]


@dataclass(frozen=True)
class Delivered:
    """Written files. `done` has the speed in its report."""

    done: Done
    artifact: Any = None
    """The lowered artifact; None if the program was not lowered."""
    why_not: str = ""
    """The reason why it was not lowered, or its speed not measured."""
    files: tuple[tuple[str, Path], ...] = ()
    """The kind and path of each written file."""
    target: str = ""
    """The name of the target it was lowered for."""

    @property
    def is_elsewhere(self) -> bool:
        """True if another runtime runs the artifact: its share of the program is reported."""
        return self.artifact is not None and any(artifact_of(path) is not None for _, path in self.files)

    def show_artifact(self, screen: Screen) -> None:
        """Print what another runtime runs."""
        if self.is_elsewhere:
            with blamed(f"printing what {self.target} lowers to"):
                screen.text(str(self.artifact))

    def to_data(self) -> dict[str, Any]:
        return {
            **self.done.to_data(),
            "artifact": None if self.artifact is None else TARGETS[self.target].data_of(self.artifact),
            "not_lowered": self.why_not or None,
            "files": {what: str(path) for what, path in self.files},
        }


def check_out(out: Path | None, backend: Any, to: str, say: Say) -> None:
    """Refuse outputs that cannot be written, before any work is done, and announce every file."""
    if out is None:
        return
    where = f"--out {out}"
    if (target := artifact_of(out)) is not None:
        TARGETS[target].check_ready()
        _check_suited(out, target, backend, to)
    if out.suffix == ".html":
        raise QuantcError(
            f"{out} would hold the report, and no program",
            where=where,
            advice="name the program: with --out model.qc the report is written to model.html",
        )
    check_ending(out, ("", ".qc", *suffixes()), "a quantized program")
    outputs = plan_outputs(out, backend.name)
    check_outputs(outputs, where)
    say(f"to be written: {', '.join(f'{output.path} ({output.what})' for output in outputs)}")


def _check_suited(out: Path, target: str, backend: Any, to: str) -> None:
    """Refuse a file for one runtime of a program quantized for another: it would be right, and mostly float."""
    where = f"--out {out} --backend {backend.name}"
    if to == "integer":
        raise QuantcError(
            f"{out.suffix} files are written from the Q/DQ form, and the integer form was asked for",
            where=where,
            advice="leave --to integer out",
        )
    if target in (backend.name, target_of(backend)):
        return
    raise QuantcError(
        f"{out} would be for {target}, and the program is quantized for {backend.name}",
        where=where,
        advice=f"give --backend {target}, or --out {out.with_suffix('.qc')} for {backend.name}",
    )


def plan_outputs(out: Path, backend: str) -> list[Output]:
    """Files for `--out`, side by side under one name: program, artifact and report."""
    asked = artifact_of(out)
    target = asked or backend
    program = out.with_suffix(".qc") if asked is not None else out
    outputs = [Output("program", program, "program")]
    if asked is not None or target in TARGETS:
        suffix = TARGETS[target].suffix
        place = out if asked is not None else program.with_suffix(suffix or f".{target}.qc")
        outputs.append(Output("artifact", place, _kind(TARGETS[target])))
    return [*outputs, Output("report", program.with_suffix(".html"), "page")]


def _kind(target: Target) -> str | Callable[[Path], bool]:
    """The test whether an existing file is one of a target's."""
    if not target.suffix:
        return "program"
    return target.name if target.name in KINDS else target.is_own_file


def deliver(done: Done, out: Path | None, say: Say) -> Delivered:
    """Lower, measure, write. A file name that implies a target requires that lowering; otherwise a failed lowering is only reported."""
    asked = None if out is None else artifact_of(out)
    target = asked or done.result.report.backend
    artifact, why_not = None, ""
    if (
        asked is not None
        or (target in TARGETS and TARGETS[target].in_process)
        or (out is not None and target in TARGETS)
    ):
        try:
            say(f"lower for {target} ...")
            _check_form(done, TARGETS[target])
            artifact = lower(done.result.program, target)
        except QuantcError as error:
            if asked is not None:
                raise
            why_not = f"not lowered for {target}: {error.what}"
    elif out is not None:
        why_not = f"not lowered: unknown target {target!r}"
    if artifact is not None:
        say("time ...")
        done, why_not = _time(done, artifact, target)
    delivered = Delivered(done, artifact, why_not, target=target)
    return delivered if out is None else _write_files(delivered, out)


def _check_form(done: Done, target: Target) -> None:
    """Refuse the integer form where files are written from the Q/DQ form."""
    if target.suffix and done.result.report.form == "integer":
        raise QuantcError(
            f"{done.result.program.name} is in integer form, and {target.suffix} files are written from the Q/DQ form"
        )


def _write_files(delivered: Delivered, out: Path) -> Delivered:
    """Write the planned files, except an artifact that does not exist, or is no file."""
    done, artifact, why_not = delivered.done, delivered.artifact, delivered.why_not
    outputs = plan_outputs(out, delivered.target)
    check_outputs(outputs, f"--out {out}")  # the work took its time
    out.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for what, path, _ in outputs:
        if what == "program":
            done.result.save(path)
        elif what == "report":
            write_text(path, done.to_html())
        elif callable(getattr(artifact, "save", None)):
            TARGETS[delivered.target].save(artifact, path)
        else:
            unsaved = f"not written: what {delivered.target} lowers to cannot be saved"
            why_not = why_not if artifact is None else "; ".join(filter(None, (why_not, unsaved)))
            continue
        files.append((what, path))
    return replace(delivered, files=tuple(files), why_not=why_not)


def _time(done: Done, artifact: Any, target: str) -> tuple[Done, str]:
    """Time per call of the float program, and of the quantized one's artifact, interleaved."""
    captured = done.result.captured
    if captured.example_inputs is None:
        return done, "speed not measured: there are no example inputs"
    if not callable(artifact):
        return done, f"speed not measured: what {target} lowers to cannot be called"
    steps = {EAGER: _call(captured, captured.module), target: _call(captured, artifact)}
    try:
        with blamed(f"calling what {target} lowers to"):
            steps[target]()
        with quietly_on_one_thread():
            base, why_not = _float_run(target, captured)
            if base is not None:
                steps[base.runtime] = _call(captured, base.model)
            spent = take_turns(steps, (), ROUNDS)
    except QuantcError as error:  # such as a runtime that is not installed: the file can be written all the same
        return done, f"speed not measured: {error.what}"
    best = {name: min(times) * 1e3 for name, times in spent.items()}
    found = Speed(target, best[EAGER], best[target], why_not=why_not)
    if base is not None:
        found = replace(found, runtime=base.runtime, runtime_before=best[base.runtime])
    result = replace(done.result, report=replace(done.result.report, speed=found))
    return replace(done, result=result), ""


def _float_run(target: str, captured: Program) -> tuple[FloatRun | None, str]:
    """The float program on the same runtime; or the reason why there is none, or it does not run."""
    try:
        found = in_float(target, captured)
        _call(captured, found.model)()
    except QuantcError as error:
        return None, f"float on the same runtime not measured: {error.what}"
    return found, ""


def _call(captured: Program, model: Callable[..., Any]) -> Forward:
    args, kwargs = pytree.tree_unflatten(list(captured.example_inputs or ()), captured.signature.in_spec)
    return lambda: model(*args, **kwargs)
