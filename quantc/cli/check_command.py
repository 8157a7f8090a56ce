"""The command `quantc check-backend`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

from typing import Annotated

import typer

from quantc.cli.options import Json

FAILED = 3
"""The exit code of a backend that fails a check."""


def check_backend(
    name: Annotated[str, typer.Argument(help="An installed backend, or the place of one, package.module:NAME.")],
    as_json: Json = False,
) -> None:
    """Check that a backend does what its table says, on models made for each of its rules.

    The target of the same name takes part: its invariants are held, and its lowering has to be there.
    """
    from quantc.cli.model_source import import_object
    from quantc.errors import UnknownNameError, suggest
    from quantc.pipeline.registry import BACKENDS
    from quantc.targets.target import TARGETS
    from quantc.testing.kit import check_backend as check

    if ":" not in name and name not in BACKENDS:
        advice = suggest(name, BACKENDS.names(), noun="backends")
        raise UnknownNameError(f"unknown backend {name!r}", where="quantc check-backend", advice=advice)
    backend = import_object(name) if ":" in name else BACKENDS[name]
    if (target := getattr(backend, "name", name)) in TARGETS:
        TARGETS[target].check_ready()
    found = check(backend, progress="auto")
    typer.echo(found.to_json() if as_json else str(found))
    if not found.passed:
        raise typer.Exit(FAILED)
