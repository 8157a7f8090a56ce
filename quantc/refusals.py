"""How a command refuses: a message on stderr, with `--json` a document on stdout as well, and an exit code.

0 is done, 1 refused, 2 wrong usage; `quantc compare --at-least` has 3 of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec

import typer

from quantc.errors import QuantcError

P = ParamSpec("P")
REFUSED = 1
STANDARD_OUTPUT = "-"
"""The file name that stands for it."""


def refusing(command: Callable[P, None]) -> Callable[P, None]:
    """Turn quantc's errors, and files that cannot be written, into a message and exit code 1, without a traceback."""

    @wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.BadParameter as error:
            _document(kwargs, {"type": "BadParameter", "what": error.message, "where": error.param_hint})
            raise  # typer adds how the command is used, and leaves with 2
        except BrokenPipeError:
            raise  # whoever read our output has had enough; typer leaves quietly
        except (QuantcError, OSError) as error:
            data = error_data(error)
            _document(kwargs, data)
            notes = "".join(f"\n  {note}" for note in data["notes"])
            typer.echo(f"error: {error}{notes}", err=True)
            raise typer.Exit(REFUSED) from error

    return told


def error_data(error: QuantcError | OSError) -> dict[str, Any]:
    """An error for machines: its type, what it says in parts, and all that goes with it."""
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
