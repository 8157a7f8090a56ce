"""The command line. Exit codes: 0 success, 1 error (one of quantc's, on stderr), 2 wrong usage, 3 comparison beyond the threshold.

With `--json`, standard output is one JSON document and nothing else, for errors too (`quantc.cli.error_output`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantc.cli.bench import bench
from quantc.cli.check_command import check_backend
from quantc.cli.compare_command import compare
from quantc.cli.error_output import Telling, report_errors
from quantc.cli.options import (
    CaptureMethod,
    Format,
    Guarding,
    Json,
    MethodOption,
    ModeOption,
    Narrowed,
    QuantizedForm,
    Source,
    Technique,
)
from quantc.errors import LoadError, SaveError
from quantc.support.terminal import Screen

if TYPE_CHECKING:
    from quantc.files.output_paths import Output
    from quantc.hooks import Guard, Hook
    from quantc.inspect.explain import NodeExplanation
    from quantc.ir.program import DumpFormat, Program
    from quantc.patterns.explain_match import Explanation as TableExplanation
    from quantc.patterns.table import RuleTable
    from quantc.support.progress import Style
    from quantc.verbs.capture import Method

FUSIONS = "quantc.patterns.fusions:FUSIONS"
REPRODUCER = Path("quantc-reproducer")
SUFFIXES: dict[str, DumpFormat] = {".json": "json", ".dot": "dot", ".graphml": "graphml"}

app = typer.Typer(
    cls=Telling,
    help="A quantization compiler for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app()


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if show_version:
        typer.echo(f"quantc {version('quantc')}")
        raise typer.Exit


@app.command()
@report_errors
def inspect(
    source: Source = None,
    form: Annotated[Format | None, typer.Option("--format", help="Print the program in this form.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the program to a file, in the form its name tells.")] = None,
    method: MethodOption = CaptureMethod.auto,
    sums: Annotated[bool, typer.Option("--accumulators", help="Show the bounds of every product's sums.")] = False,
    only: Annotated[
        str | None,
        typer.Option(help="With --format: a module by its path, or nodes from one to another.", metavar="PATH|A..B"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a model's capture method, ops, opaque parts and pass log.

    For a converted program, also whether its sums can overflow.
    """
    from quantc.cli.inspect_summary import summarize
    from quantc.integer.proof.overflow_report import accumulators, why_not_provable
    from quantc.support.terminal import readable

    if only is not None and (form is None or out is not None):
        raise typer.BadParameter("it prints a part, in the form that --format names", param_hint="--only")
    if out is not None:
        _plan_files(out, form)
    program = _load(source, method)
    if out is not None:
        _write(program, out, form)
    elif form is not None:
        Screen().text(program.dump(form.value, only=only))
        return
    summary = summarize(program)
    found = accumulators(program) if sums or why_not_provable(program) is None else None
    if as_json:
        _print_json({**summary.to_json(), "accumulators": None if found is None else found.to_data()})
        return
    screen = Screen()
    listed = {"opaque nodes": summary.opaque, "nested graphs": summary.graphs}
    screen.fields(
        summary.name,
        {
            "captured by": f"{summary.method} ({summary.why})" if summary.why else summary.method,
            "stage": f"{summary.stage}, in {summary.mode} mode",
            "nodes": f"{summary.nodes:,}",
            "parameters": f"{summary.parameters:,}",
            "size": readable(summary.bytes),
            **{name: "\n".join(items) if items else "none" for name, items in listed.items()},
            **({} if found is None else {"accumulators": found.headline}),
            **({"warnings": "\n".join(summary.warnings)} if summary.warnings else {}),
        },
    )
    if sums and found is not None:
        screen.text(str(found))
    screen.table("ops", ("op", "count", "kind"), [(row.op, str(row.count), row.kind) for row in summary.ops])
    _show_log(screen, program)
    if out is not None:
        _list_written(out, form)


@app.command()
@report_errors
def quantize(
    source: Source = None,
    backend: Annotated[str, typer.Option(help="What to quantize for; `quantc backends` lists them.")] = "x86",
    config: Annotated[
        Path | None, typer.Option(help="A .toml or .json file with what is to be done otherwise.")
    ] = None,
    mode: ModeOption = Technique.static,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            help="How to quantize everything, by name or as text: INT4_GROUP, UINT8_TOKEN, int4{role=weight ...}; may be "
            "repeated, and --config has the last word.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="What to calibrate with, and to measure on: a .npz or .safetensors file with one array for each input, "
            "or package.module:factory. Modes dynamic and weight-only need none.",
            metavar="FILE|MODULE:NAME",
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="What the model takes of each batch: the place or the name of an item, or several: 0, image, ids,mask.",
            metavar="KEY[,KEY...]",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Cast a copy of the model, and the batches, to this: float32.", metavar="float32"),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="How many of the last batches to keep from calibration, and to measure on; by default the first are measured on.",
            min=1,
            metavar="COUNT",
        ),
    ] = None,
    recover: Annotated[
        str | None,
        typer.Option(
            help="Fit weights to what their layers read: auto, or the passes, as in rescale,round,correct-bias.",
            metavar="auto|PASSES",
        ),
    ] = None,
    reduce_range: Annotated[
        Narrowed,
        typer.Option(
            help="What to make narrower where pairs of products could overflow; auto: what the backend needs."
        ),
    ] = Narrowed.auto,
    to: Annotated[QuantizedForm, typer.Option(help="The form of the quantized program.")] = QuantizedForm.qdq,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the quantized program to this file, and beside it what it was lowered to and a report: model.qc, "
            "model.x86.qc and model.html; .onnx is for ONNX runtimes, .pte for ExecuTorch."
        ),
    ] = None,
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """Quantize a model, and report coverage, accuracy, size and speed.

    Without SOURCE it runs the built-in example: a small CNN on digit images, with its accuracy on held-out images.
    """
    from quantc.cli.quantize_outputs import check_out, deliver
    from quantc.cli.run_quantize import Taken, Wanted, carry_out
    from quantc.config.config import QuantConfig
    from quantc.pipeline.registry import BACKENDS
    from quantc.spec.spec import QuantSpec

    settings = QuantConfig.load(config) if config is not None else None
    specs = tuple(QuantSpec.parse(text) for text in spec or ())
    taken = Taken.parse(inputs, dtype)
    wanted = Wanted(
        BACKENDS[backend], mode.value, specs, settings, to.value, reduce_range.value, held_out, taken, recover or False
    )
    progress: Style = "bar" if sys.stderr.isatty() else "lines"
    say = partial(typer.echo, err=True)
    check_out(out, wanted.backend, to.value, say)
    made = deliver(carry_out(source, data, wanted, method.value, say, progress), out, say)
    if as_json:
        _print_json({**made.to_data(), "out": str(out) if out is not None else None})
        return
    screen = Screen()
    made.done.show(screen)
    made.show_artifact(screen)
    if made.why_not:
        typer.echo(f"note: {made.why_not}", err=True)
    for what, path in made.files:
        typer.echo(f"{what} written to {path}", err=True)


@app.command()
@report_errors
def run(
    pipeline: Annotated[str, typer.Argument(help='Pipeline text, such as "canonicalize,fuse".')],
    source: Source = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the result to a file; a .txt gets its tensors beside it.")
    ] = None,
    show_diff: Annotated[bool, typer.Option("--diff", help="Show what each pass changed.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Show the time each pass took.")] = False,
    dump_to: Annotated[Path | None, typer.Option(help="Write the program after each pass to this folder.")] = None,
    guard: Annotated[Guarding, typer.Option(help="Compare the numbers before and after each pass.")] = Guarding.auto,
    reproducer: Annotated[Path, typer.Option(help="If a pass fails, write what shows it again here.")] = REPRODUCER,
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """Run a pipeline on a model, verifying after each pass."""
    from quantc.hooks import Diff, DumpTo, Reproducer, Timing, Verify
    from quantc.pipeline.pipeline import Pipeline

    steps = Pipeline.parse(pipeline)
    if out is not None:
        _plan_files(out, None)
    program = _load(source, method)
    start = len(program.log)
    watch, clock, diffs = _guard(guard), Timing(), Diff()
    hooks: list[Hook] = [Reproducer(reproducer), Verify(), clock]
    hooks += [watch] if watch is not None else []
    hooks += [diffs] if show_diff else []
    hooks += [DumpTo(dump_to)] if dump_to is not None else []
    steps.run(program, hooks)
    if out is not None:
        _write(program, out, None)
    if as_json:
        _print_json(
            {
                "pipeline": str(steps),
                "stage": program.stage.label,
                "log": [asdict(entry) for entry in program.log[start:]],
                "guarded": watch.checked if watch is not None else [],
                "not_guarded": watch.skipped if watch is not None else [],
                **(
                    {"diff": [{"pass": str(pass_), **json.loads(found.to_json())} for pass_, found in diffs.rows]}
                    if show_diff
                    else {}
                ),
            }
        )
        return
    screen = Screen()
    _show_log(screen, program, start)
    if show_diff:
        screen.diff(str(diffs) or "nothing changed")
    if timing:
        screen.text(str(clock))
    for reason in watch.skipped if watch is not None else ():
        typer.echo(f"numbers not compared: {reason}", err=True)
    if out is not None:
        _list_written(out, None)


@app.command()
@report_errors
def explain(
    source: Annotated[str, typer.Argument(help="A .qc or .pt2 file, a .txt dump, or package.module:factory.")],
    node: Annotated[
        str,
        typer.Argument(help="The name of a node, as `quantc inspect --format text` shows it, or the path of a module."),
    ],
    table: Annotated[
        str | None, typer.Option(help=f"A rule table; by default {FUSIONS}.", metavar="MODULE:NAME")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Prepare the program for this backend first.")] = None,
    mode: ModeOption = Technique.static,
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """List the rules tried at a node, those that matched, and why the others refused.

    With a backend, or for a prepared program: the verdict on the node, and the smallest change that would let a rule
    claim it.
    """
    from quantc.inspect.explain import folded_into
    from quantc.ir.program import Stage

    program = _load(source, method)
    is_table = table is not None or (backend is None and program.stage < Stage.ANNOTATED)
    if is_table:
        explanation: TableExplanation | NodeExplanation = _table(table, backend).explain(program, node)
    else:
        prepared = _prepare_for(program, backend, mode)
        if (error := folded_into(program, prepared, node)) is not None:
            raise error
        explanation = prepared.explain(node)
    if as_json:
        _print_json(json.loads(explanation.to_json()))
        return
    Screen().text(str(explanation))


@app.command()
@report_errors
def verify(
    source: Annotated[str, typer.Argument(help="A .qc or .pt2 file, a .txt dump, or package.module:factory.")],
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """Check that a program's file is intact, satisfies the IR's invariants, and runs."""
    from quantc.cli.verify_file import Finding, check_up
    from quantc.support.terminal import readable

    program = _load(source, method)
    path = Path(source)
    read = f"{readable(path.stat().st_size)}, read" if path.is_file() else "captured"
    digests = ", and every digest agrees" if path.suffix == ".qc" else ""
    findings = [Finding("source", f"{read}{digests}"), *check_up(program)]
    if as_json:
        _print_json(
            {"program": program.name, "stage": program.stage.label, "findings": [asdict(row) for row in findings]}
        )
        return
    Screen().fields(f"{program.name} ({program.stage.label})", {row.checked: row.found for row in findings})


@app.command()
@report_errors
def passes(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page, docs/passes.md.")] = False,
) -> None:
    """List the installed passes and named pipelines."""
    from quantc.cli.reference_pages import pass_rows, passes_page, pipeline_rows

    if markdown:
        Screen().text(passes_page())
        return
    found, named = pass_rows(), pipeline_rows()
    if as_json:
        _print_json({"passes": [asdict(row) for row in found], "pipelines": [asdict(row) for row in named]})
        return
    screen = Screen()
    screen.table(
        "passes",
        ("pass", "options", "needs", "gives", "from", "what it does"),
        [
            (row.name, " ".join(row.options), row.needs, row.gives, row.provider, row.error or row.summary)
            for row in found
        ],
    )
    screen.table(
        "pipelines",
        ("pipeline", "options", "from", "what it does"),
        [(row.name, " ".join(row.options), row.provider, row.error or row.summary) for row in named],
    )


@app.command()
@report_errors
def backends(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page, docs/backends.md.")] = False,
) -> None:
    """List the installed backends."""
    from quantc.cli.reference_pages import backend_rows, backends_page

    if markdown:
        Screen().text(backends_page())
        return
    rows = backend_rows()
    if as_json:
        _print_json({"backends": [asdict(row) for row in rows]})
    elif rows:
        Screen().table(
            "backends",
            ("backend", "rules", "dynamic", "modes", "from", "what it is"),
            [
                (row.name, str(row.rules), str(len(row.dynamic)), ", ".join(row.modes), row.provider, row.told)
                for row in rows
            ],
        )
    else:
        typer.echo("no backends are installed", err=True)


@app.command()
@report_errors
def ops(
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page, docs/integer-form.md.")] = False,
) -> None:
    """List the formulas of ops in integer form."""
    from quantc.cli.integer_page import integer_page, semantics_rows

    if markdown:
        Screen().text(integer_page())
        return
    rows = semantics_rows()
    if as_json:
        names = ("ops", "timing", "formula", "deviation")
        _print_json({"ops": [{name: getattr(row, name) for name in names} for row in rows]})
        return
    cells = [(", ".join(row.ops), row.timing.value, row.formula, row.deviation) for row in rows]
    Screen().table("integer form", ("ops", "timing", "on integers", "deviation"), cells)


app.command()(report_errors(compare))
app.command("check-backend")(report_errors(check_backend))
app.command()(report_errors(bench))


def _load(source: str | None, method: CaptureMethod) -> Program:
    from quantc.cli.model_source import load

    chosen: Method = method.value
    return load(source, chosen)


def _guard(when: Guarding) -> Guard | None:
    from quantc.pipeline.numeric_guard import SMALL, Guard

    if when is Guarding.never:
        return None
    return Guard(limit=SMALL if when is Guarding.auto else None)


def _prepare_for(program: Program, backend: str | None, mode: Technique) -> Program:
    """The program as a backend would have it; itself if no backend is given."""
    from quantc.annotate.quantizer import mode_config, quantizer_of
    from quantc.verbs.prepare import prepare

    if backend is None:
        return program
    config = None if mode is Technique.static else mode_config(quantizer_of(backend), mode.value)
    return prepare(program, backend, config=config, allow_empty=True)


def _table(table: str | None, backend: str | None) -> RuleTable:
    from quantc.cli.model_source import import_object
    from quantc.patterns.table import RuleTable
    from quantc.pipeline.registry import BACKENDS

    if table is not None and backend is not None:
        raise typer.BadParameter("give --table or --backend, not both")
    found: Any = import_object(table or FUSIONS) if backend is None else BACKENDS[backend]
    found = getattr(found, "table", found)
    if not isinstance(found, RuleTable):
        raise LoadError(
            f"{backend or table} is a {type(found).__name__}, not a rule table",
            advice="give the place of a RuleTable: --table package.module:NAME",
        )
    return found


def _plan_files(out: Path, form: Format | None) -> list[Output]:
    """The files of `--out`. Raises ConfigError or SaveError, before the work is done, for those that cannot be written."""
    from quantc.files.endings import check_ending
    from quantc.files.output_paths import Output, check_outputs
    from quantc.text.files import constants_file, inputs_file
    from quantc.verbs.lower import artifact_of

    if form is None:
        if (target := artifact_of(out)) is not None:
            raise SaveError(
                f"{out} would have to be lowered for {target}, and this writes programs",
                where=f"--out {out}",
                advice=f"quantize it: quantc quantize SOURCE --backend {target} --out {out}",
            )
        check_ending(out, (".qc", ".txt", *SUFFIXES), "a program")
    if form is None and out.suffix == ".qc":
        outputs = [Output("program", out, "program")]
    elif form is None and out.suffix == ".txt":
        beside = {"constants": constants_file(out), "example inputs": inputs_file(out)}
        outputs = [Output("program", out, "text"), *(Output(what, at, "tensors") for what, at in beside.items())]
    else:
        chosen = form.value if form is not None else SUFFIXES.get(out.suffix, "text")
        outputs = [Output("program", out, chosen)]
    check_outputs(outputs, f"--out {out}")
    return outputs


def _write(program: Program, out: Path, form: Format | None) -> None:
    from quantc.files.atomic_file import write_text
    from quantc.files.sealed_text import sealed_text
    from quantc.text.files import Snapshot

    kind = _plan_files(out, form)[0].kind
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == "program":
        program.save(out)
    elif form is None and out.suffix == ".txt":
        Snapshot.of(program).write(out)
    else:
        chosen: Any = kind
        text = program.dump(chosen)
        write_text(out, sealed_text(text) if kind == "text" and out.suffix == ".txt" else text)


def _list_written(out: Path, form: Format | None) -> None:
    """Tell which files there are now."""
    there = [str(output.path) for output in _plan_files(out, form) if output.path.exists()]
    typer.echo(f"written to {', '.join(there)}", err=True)


def _show_log(screen: Screen, program: Program, start: int = 0) -> None:
    rows = [
        (entry.name, "yes" if entry.changed else "no", f"{entry.seconds * 1e3:.1f}", "; ".join(entry.notes))
        for entry in program.log[start:]
    ]
    screen.table("log", ("pass", "changed", "ms", "notes"), rows)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


if __name__ == "__main__":
    main()
