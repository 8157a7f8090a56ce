"""A registry of plugins, discovered through entry points.

Listing names reads the metadata of installed packages and imports nothing, so that a broken plugin is listed and raises
its error only when it is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from quantc.errors import PluginError, UnknownNameError, suggest

T = TypeVar("T")


@lru_cache(maxsize=16)
def _entries(group: str, places: tuple[tuple[str, int], ...]) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name; cached until the mtime of a folder on the path changes."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return found


def _changed_at(place: str) -> int:
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


def _nothing_against(name: str, thing: Any) -> str | None:
    return None


@dataclass(slots=True)
class Registry(Generic[T]):
    """The plugins of one kind by name. `why_not(name, thing)` gives the reason to reject one, or None."""

    noun: str
    plural: str
    group: str
    why_not: Callable[[str, Any], str | None] = _nothing_against
    session: dict[str, T] = field(default_factory=dict)
    """Plugins registered in this process, without a package."""

    def entries(self) -> dict[str, list[EntryPoint]]:
        """The entry points of each name; more than one is a conflict."""
        return _entries(self.group, tuple((place, _changed_at(place)) for place in sys.path))

    def names(self) -> list[str]:
        """Every known name. Imports nothing."""
        return sorted({*self.entries(), *self.session})

    def __contains__(self, name: object) -> bool:
        return name in self.session or name in self.entries()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> T:
        """Import and return the plugin of that name. UnknownNameError, or PluginError if it cannot be loaded."""
        entries = self.entries().get(name, [])
        if not entries and name in self.session:
            return self.session[name]
        if not entries:
            advice = suggest(name, self.names(), noun=self.plural)
            raise UnknownNameError(f"unknown {self.noun} {name!r}", advice=advice)
        if len(entries) > 1 or name in self.session:
            raise self._duplicate(name, entries)
        return self._load(entries[0])

    def usable(self) -> Iterator[tuple[str, T]]:
        """Import and yield the plugins that load."""
        for name in self.names():
            try:
                yield name, self[name]
            except PluginError:
                continue

    def provided_by(self, distribution: str) -> Iterator[tuple[str, T]]:
        """Import and yield the plugins of one distribution. PluginError if one cannot be loaded."""
        for name in self.names():
            if self.provider(name) == distribution:
                yield name, self[name]

    def provider(self, name: str) -> str:
        """The distribution that provides a plugin, or "this session"."""
        entries = self.entries().get(name, [])
        return ", ".join(_distribution(entry) for entry in entries) or "this session"

    def register(self, name: str, thing: T) -> T:
        """Add a plugin for this process only. The same definition run again (a notebook cell) replaces the old one."""
        if (reason := self.why_not(name, thing)) is not None:
            raise PluginError(f"{thing!r} cannot be registered: {reason}")
        held = self.session.get(name)
        if name in self.entries() or (held is not None and _definition(held) != _definition(thing)):
            raise PluginError(
                f"there is already a {self.noun} {name!r}, from {self.provider(name)}",
                where=".".join(_definition(thing)),
                advice="give it another name",
            )
        self.session[name] = thing
        return thing

    def forget(self, name: str) -> None:
        """Undo `register`."""
        self.session.pop(name, None)

    def _load(self, entry: EntryPoint) -> T:
        try:
            thing: T = entry.load()
        except Exception as error:
            raise PluginError(
                f"{self.noun} {entry.name!r} of {_distribution(entry)} cannot be imported: "
                f"{type(error).__name__}: {error}",
                where=_whence(entry),
                advice=f"repair or uninstall {_distribution(entry)}",
            ) from error
        if (reason := self.why_not(entry.name, thing)) is not None:
            raise PluginError(
                f"{self.noun} {entry.name!r} of {_distribution(entry)} is not usable: {reason}",
                where=_whence(entry),
                advice="correct the entry point",
            )
        return thing

    def _duplicate(self, name: str, entries: list[EntryPoint]) -> PluginError:
        offers = [f"{_distribution(entry)} ({entry.value})" for entry in entries]
        if name in self.session:
            offers.append("this session")
        return PluginError(
            f"{self.noun} {name!r} is offered more than once: by {' and by '.join(offers)}",
            where=f"entry points {self.group}",
            advice="uninstall or rename one; quantc does not guess which is meant",
        )


def _whence(entry: EntryPoint) -> str:
    return f"entry point {entry.name} = {entry.value}, from {_distribution(entry)}"


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _definition(thing: object) -> tuple[str, str]:
    return getattr(thing, "__module__", ""), getattr(thing, "__qualname__", repr(thing))
