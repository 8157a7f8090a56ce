"""Observations by name. quantc's own come in through the entry points `quantc.observations`, like anybody's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantc.errors import SpecError
from quantc.formats import PerTensor
from quantc.observe.histogram import Histogram
from quantc.observe.observation import Observation
from quantc.observe.ranges import METHODS
from quantc.registry import Registry
from quantc.spec import Option, QuantSpec

MEMBERS = ("empty", "update", "merge", "qparams", "to_state", "from_state")


def _why_not(name: str, thing: Any) -> str | None:
    if not isinstance(thing, type):
        return "it is not a class"
    missing = [member for member in MEMBERS if not callable(getattr(thing, member, None))]
    missing += [member for member in ("statistics", "order") if not hasattr(thing, member)]
    return f"it lacks {', '.join(missing)}" if missing else None


OBSERVATIONS: Registry[type[Observation]] = Registry(
    "observation", "observations", "quantc.observations", _why_not
)


def register_observation(kind: type[Observation]) -> type[Observation]:
    """Make an observation known for this process, under its `statistics` name. Works as a decorator."""
    return OBSERVATIONS.register(getattr(kind, "statistics", ""), kind)


def start(spec: QuantSpec) -> Observation:
    """The empty observation a spec asks for."""
    return OBSERVATIONS[spec.observe.name].empty(spec.granularity, dict(spec.observe.options))


def check_choice(name: str, options: Mapping[str, Option]) -> None:
    """Refuse an observation nobody offers, or options it does not have."""
    kind = OBSERVATIONS[name]
    if kind is Histogram and name in METHODS:
        METHODS[name].model_validate(dict(options))
        return
    try:
        kind.empty(PerTensor(), options)
    except SpecError as error:
        raise SpecError(error.what, where=f"observe = {name}", advice=error.advice) from error
