"""Builds a Pipeline from text: resolves names, validates options, expands named pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from pydantic import ValidationError, validate_call

from quantc.errors import PipelineError, PluginError, suggest
from quantc.pipeline.base_pass import Pass
from quantc.pipeline.registry import PASSES, PIPELINES
from quantc.support.option_text import Option, PassText, Value, pointer, read, spell

T = TypeVar("T")

_open: ContextVar[tuple[str, ...]] = ContextVar("named pipelines being expanded", default=())


def parse_passes(text: str, pipeline: type[Iterable[Pass]]) -> tuple[Pass, ...]:
    """The passes a text spells; `pipeline` is the class of named pipelines. ParseError if the text does not read,
    PipelineError if it makes no sense."""
    return tuple(pass_ for call in read(text) for pass_ in _resolve(text, call, pipeline))


def _resolve(text: str, call: PassText, pipeline: type[Iterable[Pass]]) -> Iterable[Pass]:
    is_pass, is_pipeline = call.name in PASSES, call.name in PIPELINES
    if is_pass and is_pipeline:
        raise PluginError(
            f"{call.name!r} is the name of a pass ({PASSES.provider(call.name)}) and of a pipeline "
            f"({PIPELINES.provider(call.name)})",
            where=pointer(text, call.at),
            advice="uninstall or rename one",
        )
    if is_pass:
        return (_pass(text, call),)
    if is_pipeline:
        return _named(text, call, pipeline)
    raise PipelineError(
        f"unknown pass or pipeline {call.name!r}",
        where=pointer(text, call.at),
        advice=suggest(call.name, {*PASSES, *PIPELINES}, noun="passes and pipelines"),
    )


def _pass(text: str, call: PassText) -> Pass:
    kind = PASSES[call.name]
    values = _values(text, call, tuple(kind.model_fields))
    return _validated(text, call, lambda: kind.model_validate(values))


def _named(text: str, call: PassText, pipeline: type[Iterable[Pass]]) -> Iterable[Pass]:
    factory = PIPELINES[call.name]
    values = _values(text, call, tuple(inspect.signature(factory).parameters))
    with _expanding(text, call):
        result: object = _validated(text, call, lambda: validate_call(factory)(**values))
    if not isinstance(result, pipeline):
        raise PluginError(
            f"the pipeline {call.name!r} of {PIPELINES.provider(call.name)} gives a {type(result).__name__}",
            where=pointer(text, call.at),
            advice="its function must return a quantc.Pipeline",
        )
    return result


@contextmanager
def _expanding(text: str, call: PassText) -> Iterator[None]:
    names = (*_open.get(), call.name)
    if call.name in _open.get():
        raise PipelineError(
            f"the pipeline {call.name!r} uses itself: {' uses '.join(names)}",
            where=pointer(text, call.at),
            advice="spell out the passes in one of them",
        )
    token = _open.set(names)
    try:
        yield
    finally:
        _open.reset(token)


def _values(text: str, call: PassText, expected: tuple[str, ...]) -> dict[str, Value]:
    """The options by field name; dashes become underscores."""
    values: dict[str, Value] = {}
    for option in call.options:
        name = option.name.replace("-", "_")
        if name not in expected:
            raise _unknown_option(text, call, option, expected)
        if name in values:
            raise PipelineError(
                f"{call.name} is given the option {option.name!r} twice, with a dash and with an underscore",
                where=pointer(text, option.at),
                advice="give each option once",
            )
        values[name] = option.value
    return values


def _unknown_option(text: str, call: PassText, option: Option, expected: tuple[str, ...]) -> PipelineError:
    given = ", ".join(item.name for item in call.options)
    names = [name.replace("_", "-") for name in expected]
    advice = suggest(option.name, names, noun=f"options of {call.name}")
    return PipelineError(
        f"{call.name} has no option {option.name!r} (given: {given}; expected: {', '.join(names) or 'none'})",
        where=pointer(text, option.at),
        advice=advice if names else f"{call.name} takes no options",
    )


def _validated(text: str, call: PassText, build: Callable[[], T]) -> T:
    """The result of `build`; a validation error of pydantic becomes an error that points at the value."""
    try:
        return build()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _refused(text, call, first["msg"], [str(part) for part in first["loc"]]) from error


def _refused(text: str, call: PassText, message: str, path: list[str]) -> PipelineError:
    name = path[0].replace("_", "-") if path else ""
    option = next((item for item in call.options if item.name.replace("_", "-") == name), None)
    if option is None:
        return PipelineError(
            f"{call.name} cannot be built: {name}: {message}" if name else f"{call.name} cannot be built: {message}",
            where=pointer(text, call.at),
            advice=f"write {call.name}{{{name}=...}}" if name else None,
        )
    return PipelineError(
        f"{call.name} does not take {name}={spell(option.value)}: {message}",
        where=pointer(text, option.value_at),
        advice=f'write {name}="..." if it is text' if "valid string" in message else f"correct the value of {name}",
    )
