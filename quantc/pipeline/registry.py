"""Registries of passes, pipelines and backends, discovered through entry points, quantc's own among them.

A package provides one by declaring an entry point in the group `quantc.passes`, `quantc.pipelines` or
`quantc.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

from quantc.pipeline.base_pass import Pass
from quantc.support.plugin_registry import Registry

P = TypeVar("P", bound="type[Pass]")
Factory: TypeAlias = Callable[..., Iterable[Pass]]
"""A function that gives a Pipeline."""
F = TypeVar("F", bound=Factory)


def _why_not_pass(name: str, thing: Any) -> str | None:
    if not (isinstance(thing, type) and issubclass(thing, Pass)):
        return "it is not a subclass of quantc.Pass"
    declared = getattr(thing, "name", None)
    return None if declared == name else f"the class is named {declared!r}, not {name!r}"


def _why_not_pipeline(name: str, thing: Any) -> str | None:
    return None if callable(thing) else "it is not a function that gives a quantc.Pipeline"


PASSES: Registry[type[Pass]] = Registry("pass", "passes", "quantc.passes", _why_not_pass)
PIPELINES: Registry[Factory] = Registry("pipeline", "pipelines", "quantc.pipelines", _why_not_pipeline)
BACKENDS: Registry[Any] = Registry("backend", "backends", "quantc.backends")


def register_pass(kind: P) -> P:
    """Register a pass for pipeline text in this process, without a package. Works as a decorator."""
    PASSES.register(getattr(kind, "name", ""), kind)
    return kind


def register_pipeline(factory: F, *, name: str | None = None) -> F:
    """Register a named pipeline for this process: a function that returns a Pipeline; its parameters are options.

    The name is the function's, with dashes, unless one is given.
    """
    PIPELINES.register(name or factory.__name__.replace("_", "-"), factory)
    return factory
