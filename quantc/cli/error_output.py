"""Error output of commands: a message on stderr, with `--json` a document on stdout as well, and an exit code.

0 is success, 1 error, 2 wrong usage; `quantc compare --at-least` adds 3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import typer
from typer.core import TyperGroup

from quantc.errors import QuantcError

P = ParamSpec("P")
USAGE: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""The base class of typer's usage errors, which has no public name."""
GIVEN = "quantc.given"
"""Key of a call's arguments in its context."""
REFUSED = 1
STANDARD_OUTPUT = "-"
"""The file name that stands for it."""


def report_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Decorator that turns quantc's errors, and files that cannot be written, into a message and exit code 1, without a traceback."""

    @wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever read our output has had enough; typer leaves quietly
        except (QuantcError, OSError) as error:
            data = error_data(error)
            _document(kwargs, data)
            notes = "".join(f"\n  {note}" for note in data["notes"])
            typer.echo(f"error: {error}{notes}", err=True)
            raise typer.Exit(REFUSED) from error

    return told


class Telling(TyperGroup):
    """Command group that reports wrong usage as a JSON document as well, if requested, before typer's own message."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        given = list(args)
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except USAGE as error:
            _tell_usage(error, given)
            raise
        context.meta[GIVEN] = given
        return context

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE as error:
            _tell_usage(error, ctx.meta[GIVEN])
            raise


def _tell_usage(error: Any, args: Sequence[str]) -> None:
    where = getattr(error, "param_hint", None) or " ".join(getattr(getattr(error, "param", None), "opts", ())) or None
    context = getattr(error, "ctx", None)
    advice = None if context is None else f"{context.command_path} --help says how it is used"
    data = {
        "type": type(error).__name__,
        "what": error.message or error.format_message(),
        "where": where,
        "advice": advice,
    }
    _document({"as_json": _is_asked_for(args)}, data)


def _is_asked_for(args: Sequence[str]) -> bool:
    """True if a command line requests a document on standard output. For `bench`, --json names a file otherwise."""
    if "--json" not in args:
        return f"--json={STANDARD_OUTPUT}" in args
    return args[0] != "bench" or args[args.index("--json") + 1 :][:1] == [STANDARD_OUTPUT]


def error_data(error: QuantcError | OSError) -> dict[str, Any]:
    """An error as JSON-compatible data: its type, message parts and attributes."""
    own = error if isinstance(error, QuantcError) else QuantcError(str(error))
    return {
        "type": type(error).__name__,
        "what": own.what,
        "where": own.where,
        "advice": own.advice,
        "details": [*getattr(error, "faults", ()), *getattr(error, "failures", ())],
        "notes": list(getattr(error, "__notes__", ())),
    }


def _document(options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Print an error as the one document, where one was asked for on standard output."""
    if options.get("as_json") or options.get("to_json") == STANDARD_OUTPUT:
        typer.echo(json.dumps({"error": dict(data)}, indent=2, ensure_ascii=False))
