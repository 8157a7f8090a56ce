"""The command `quantc check-backend`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quantc.cli.options import Json

FAILED = 3
"""The exit code of what fails a check."""


def check_backend(
    name: Annotated[
        str,
        typer.Argument(
            help="An installed backend, quantizer, target, pass or observation, or the place of one, package.module:NAME."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Check that a backend does what its table says, on models made for each of its rules.

    The target of the same name takes part: its invariants are held, and programs are lowered to it. Quantizers, targets,
    passes and observations are checked as well, on example programs.
    """
    from quantc.testing.backend_checks import check_backend as check

    found = check(_plugin(name), progress="auto")
    typer.echo(found.to_json() if as_json else str(found))
    if not found.passed:
        raise typer.Exit(FAILED)


def _plugin(name: str) -> Any:
    """Resolve a name or import path: backends first, then targets, passes, observations."""
    from quantc.cli.model_source import import_object
    from quantc.errors import UnknownNameError, suggest
    from quantc.observe.observation_registry import OBSERVATIONS
    from quantc.pipeline.registry import BACKENDS, PASSES
    from quantc.targets.target import TARGETS

    if ":" in name:
        return import_object(name)
    registries: list[Any] = [BACKENDS, TARGETS, PASSES, OBSERVATIONS]
    for registry in registries:
        if name in registry:
            found = registry[name]
            if registry is BACKENDS and name in TARGETS:
                TARGETS[name].check_ready()
            return found
    known = [each for registry in registries for each in registry.names()]
    raise UnknownNameError(
        f"unknown backend {name!r}", where="quantc check-backend", advice=suggest(name, known, noun="names")
    )
