"""The command line. Exit codes: 0 success, 1 error (one of quantc's, on stderr), 2 wrong usage, 3 comparison beyond the threshold.

With `--json`, standard output is one JSON document and nothing else, for errors too (`quantc.cli.error_output`).
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from quantc.cli.bench import bench
from quantc.cli.check_command import check_backend
from quantc.cli.compare_command import compare
from quantc.cli.error_output import Telling, report_errors
from quantc.cli.explain_command import explain
from quantc.cli.inspect_command import inspect
from quantc.cli.list_commands import backends, ops, passes
from quantc.cli.quantize_command import quantize
from quantc.cli.run_command import run
from quantc.cli.verify_command import verify

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


app.command()(report_errors(inspect))
app.command()(report_errors(quantize))
app.command()(report_errors(run))
app.command()(report_errors(explain))
app.command()(report_errors(verify))
app.command()(report_errors(passes))
app.command()(report_errors(backends))
app.command()(report_errors(ops))
app.command()(report_errors(compare))
app.command("check-backend")(report_errors(check_backend))
app.command()(report_errors(bench))


if __name__ == "__main__":
    main()
