"""Selectors: the nodes of a program that a rule applies to, as data.

A module selects everything inside it: `layer1` covers `layer1.0.conv` too, and a type covers everything its instances
contain.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from quantc.errors import ConfigError
from quantc.support.validated import Frozen

Name = Annotated[str, Field(min_length=1)]


class _Selector(Frozen, frozen=True):
    noun: ClassVar[str] = "selector"
    fault = ConfigError


class ByModule(_Selector, frozen=True):
    """Modules by path: `layer1.0.conv`, or a glob such as `layer*.conv`."""

    by: Literal["module"] = "module"
    path: Name

    def matches(self, path: str) -> bool:
        return fnmatchcase(path, self.path)

    def __str__(self) -> str:
        return self.path


class ByRegex(_Selector, frozen=True):
    """Modules whose whole path a regular expression matches."""

    by: Literal["regex"] = "regex"
    pattern: Name

    def why_not(self) -> str | None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            return f"pattern: it is no regular expression: {error}"
        return None

    def matches(self, path: str) -> bool:
        return re.fullmatch(self.pattern, path) is not None

    def __str__(self) -> str:
        return f"/{self.pattern}/"


class ByType(_Selector, frozen=True):
    """Modules by class: its full name `torch.nn.modules.linear.Linear`, or `Linear`."""

    by: Literal["type"] = "type"
    name: Name

    @staticmethod
    def of(kind: type[nn.Module]) -> ByType:
        return ByType(name=f"{kind.__module__}.{kind.__qualname__}")

    def matches(self, module_type: str) -> bool:
        return self.name in (module_type, module_type.rpartition(".")[2])

    def __str__(self) -> str:
        return f"type {self.name}"


class ByOp(_Selector, frozen=True):
    """Ops by name in the dialect: `add`, `conv2d`, `aten.cumsum.default`."""

    by: Literal["op"] = "op"
    op: Name

    def __str__(self) -> str:
        return f"op {self.op}"


class ByNode(_Selector, frozen=True):
    """One node by name; `branch/name` in a nested graph. `branch/*` is everything in that graph."""

    by: Literal["node"] = "node"
    node: Name

    @property
    def graph(self) -> str | None:
        """The nested graph selected as a whole, or None."""
        return self.node.removesuffix("/*") if self.node.endswith("/*") else None

    def __str__(self) -> str:
        return f"node {self.node}"


class ByEdge(_Selector, frozen=True):
    """The tensor from one node to another. Each end is a node's name or a module's path."""

    by: Literal["edge"] = "edge"
    producer: Name
    consumer: Name

    def __str__(self) -> str:
        return f"edge {self.producer} -> {self.consumer}"


class ByAll(_Selector, frozen=True):
    """Everything."""

    by: Literal["all"] = "all"

    def __str__(self) -> str:
        return "everything"


AnySelector = ByModule | ByRegex | ByType | ByOp | ByNode | ByEdge | ByAll
Selector = Annotated[AnySelector, Field(discriminator="by")]
Key = str | re.Pattern[str] | type[nn.Module] | AnySelector
"""A key that users may pass: a path or glob, a compiled regular expression, a module class, or a selector."""


def selector_of(key: Any) -> AnySelector:
    """The selector for a key."""
    if isinstance(key, _Selector):
        return key  # type: ignore[return-value]
    if isinstance(key, str):
        return ByModule(path=key)
    if isinstance(key, re.Pattern):
        return ByRegex(pattern=key.pattern)
    if isinstance(key, type) and issubclass(key, nn.Module):
        return ByType.of(key)
    raise ConfigError(
        f"{key!r} selects nothing",
        advice="give a module's path or glob, a compiled regular expression, a module class, or a selector",
    )


@cache
def ancestors(path: str) -> tuple[str, ...]:
    """The paths of a module and its enclosing modules, outermost first; the root alone has the empty path."""
    parts = path.split(".")
    return tuple(".".join(parts[: end + 1]) for end in range(len(parts)))


def graphs_around(node: str) -> list[str]:
    """The paths of the nested graphs that contain a node, outermost first, by the node's name."""
    parts = node.split("/")[:-1]
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]
