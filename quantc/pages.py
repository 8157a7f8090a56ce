"""The reference page of passes, made from the passes themselves: docs/passes.md cannot drift from the code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from quantc.errors import QuantcError
from quantc.pipeline import Pass, Pipeline
from quantc.pipeline_text import spell
from quantc.registry import PASSES, PIPELINES

INTRO = """\
# Passes

Made by `quantc passes --markdown` from the passes' own docstrings; change it there. How to write one:
[write-a-pass.md](write-a-pass.md).

A pass *needs* a stage the program must have reached, may *give* one, and may have to run *before* one. What it
promises about the numbers is what the `Guard` hook checks.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of `quantc passes`. `error` says why a plugin cannot be used; the rest is then unknown."""

    name: str
    provider: str
    summary: str = ""
    options: tuple[str, ...] = ()
    needs: str = ""
    gives: str = ""
    error: str = ""


def pass_rows() -> list[Row]:
    """Every pass that is known, those that cannot be imported included."""
    return [_row(name, PASSES.provider(name), _pass_row) for name in PASSES]


def pipeline_rows() -> list[Row]:
    """Every named pipeline that is known."""
    return [_row(name, PIPELINES.provider(name), _pipeline_row) for name in PIPELINES]


def passes_page(provider: str = "quantc") -> str:
    """docs/passes.md: the passes and pipelines that one distribution offers."""
    passes = [kind for name, kind in PASSES.usable() if PASSES.provider(name) == provider]
    pipelines = [(name, make) for name, make in PIPELINES.usable() if PIPELINES.provider(name) == provider]
    parts = [INTRO, *("\n".join(_pass_section(kind)) for kind in passes), "# Named pipelines\n"]
    parts += ["\n".join(_pipeline_section(name, make)) for name, make in pipelines]
    return "\n".join(parts)


def _row(name: str, provider: str, build: Callable[[str], Row]) -> Row:
    try:
        return build(name)
    except QuantcError as error:
        return Row(name, provider, error=error.what)


def _pass_row(name: str) -> Row:
    kind = PASSES[name]
    gives = kind.gives.label if kind.gives is not None else ""
    return Row(name, PASSES.provider(name), kind.summary(), kind.options(), kind.needs.label, gives)


def _pipeline_row(name: str) -> Row:
    factory = PIPELINES[name]
    options = tuple(option.replace("_", "-") for option in inspect.signature(factory).parameters)
    return Row(name, PIPELINES.provider(name), _doc(factory).partition("\n")[0], options)


def _pass_section(kind: type[Pass]) -> Iterator[str]:
    facts = [f"needs {kind.needs.label}"]
    facts += [f"gives {kind.gives.label}"] if kind.gives is not None else []
    facts += [f"before {kind.before.label}"] if kind.before is not None else []
    facts.append(f"numbers: {kind.preserves.value}")
    yield f"## {kind.name}\n"
    yield f"{_doc(kind)}\n"
    yield f"*{' · '.join(facts)}*\n"
    if kind.model_fields:
        yield "| option | type | default | |"
        yield "|---|---|---|---|"
        yield from (_option_line(name, field) for name, field in kind.model_fields.items())
        yield ""


def _option_line(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{_default(field.get_default(call_default_factory=True))}`"
    cells = (f"`{name.replace('_', '-')}`", f"`{_type(field.annotation)}`", default, field.description or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def _pipeline_section(name: str, factory: Callable[..., Pipeline]) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{_doc(factory)}\n"
    required = [item for item in inspect.signature(factory).parameters.values() if item.default is item.empty]
    if not required:
        yield f"`{factory()}`\n"


def _doc(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _type(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _default(value: Any) -> str:
    try:
        return spell(value)
    except TypeError:
        return str(value)
