"""Registry of observations. quantc's own are entry points in `quantc.observations`, like those of any package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from quantc.errors import PluginError, QuantcError, UnknownNameError
from quantc.observe.histogram import Histogram
from quantc.observe.ranges import METHODS
from quantc.spec.formats import PerTensor
from quantc.spec.observation import Observation
from quantc.spec.spec import OBSERVE_CHECKS, Option, QuantSpec
from quantc.support.plugin_registry import Registry

MEMBERS = ("empty", "update", "merge", "qparams", "to_state", "from_state")


def _why_not(name: str, thing: Any) -> str | None:
    if not isinstance(thing, type):
        return "it is not a class"
    missing = [member for member in MEMBERS if not callable(getattr(thing, member, None))]
    missing += [member for member in ("statistics", "order") if not hasattr(thing, member)]
    return f"it lacks {', '.join(missing)}" if missing else None


OBSERVATIONS: Registry[type[Observation]] = Registry("observation", "observations", "quantc.observations", _why_not)


def register_observation(kind: type[Observation]) -> type[Observation]:
    """Register an observation for this process, under its `statistics` name. Works as a decorator."""
    return OBSERVATIONS.register(getattr(kind, "statistics", ""), kind)


def start(spec: QuantSpec) -> Observation:
    """The empty observation of a spec."""
    return OBSERVATIONS[spec.observe.name].empty(spec.granularity, dict(spec.observe.options))


_ABSENT: ContextVar[list[str] | None] = ContextVar("absent observations", default=None)


@contextmanager
def absent_allowed() -> Iterator[list[str]]:
    """Allow specs to name unavailable observations in this context: a converted program has its scales and observes no
    more. Yields the list of reasons why each one met is unavailable."""
    absent: list[str] = []
    token = _ABSENT.set(absent)
    try:
        yield absent
    finally:
        _ABSENT.reset(token)


def why_not_choice(name: str, options: Mapping[str, Option]) -> str | None:
    """The reason why a spec cannot name this observation: it is unavailable, or has no such option."""
    try:
        kind = OBSERVATIONS[name]
        if kind is Histogram and name in METHODS:
            METHODS[name].model_validate(dict(options))
        else:
            kind.empty(PerTensor(), options)
    except (UnknownNameError, PluginError) as error:
        told = f"{error.what}; {error.advice}" if error.advice else error.what
        if (absent := _ABSENT.get()) is None:
            return told
        absent.append(told)
    except QuantcError as error:
        return f"{error.what}; {error.advice}" if error.advice else error.what
    return None


OBSERVE_CHECKS.append(why_not_choice)
