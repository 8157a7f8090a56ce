"""Registry of statistics. quantc's own are entry points in `quantc.statistics`, like those of any package."""

from __future__ import annotations

from typing import Any

from quantc.spec.statistic import Statistic
from quantc.support.plugin_registry import Registry

MEMBERS = ("empty", "update", "merge", "carried", "to_state", "from_state")


def _why_not(name: str, thing: Any) -> str | None:
    if not isinstance(thing, type):
        return "it is not a class"
    missing = [member for member in MEMBERS if not callable(getattr(thing, member, None))]
    missing += [member for member in ("statistics", "order", "seen") if not hasattr(thing, member)]
    return f"it lacks {', '.join(missing)}" if missing else None


STATISTICS: Registry[type[Statistic]] = Registry("statistic", "statistics", "quantc.statistics", _why_not)
