"""The commands that list what is installed: `quantc passes`, `backends` and `ops`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from quantc.cli.options import Json, print_json
from quantc.support.terminal import Screen


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
        print_json({"passes": [asdict(row) for row in found], "pipelines": [asdict(row) for row in named]})
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
        print_json({"backends": [asdict(row) for row in rows]})
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
        print_json({"ops": [{name: getattr(row, name) for name in names} for row in rows]})
        return
    cells = [(", ".join(row.ops), row.timing.value, row.formula, row.deviation) for row in rows]
    Screen().table("integer form", ("ops", "timing", "on integers", "deviation"), cells)
