"""Reasons why a rule does not fit, as data that tools can act on. The text of a cause is for people.

A condition (see `predicates.py`) may return one of these instead of text; then `explain` can say what would have to
change.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import fx

from quantc.ir.types import DTYPE_NAMES, TensorType
from quantc.patterns.checks import Check
from quantc.patterns.operand_patterns import LeafKind

NOUNS = {
    LeafKind.VALUE: "a tensor",
    LeafKind.CONST: "a constant tensor",
    LeafKind.NUMBER: "a number",
    LeafKind.LIST: "a list of tensors",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Base class of causes. Fields are nodes and plain values; `kind` names the class in data."""

    kind: ClassVar[str] = "other"

    def to_data(self) -> dict[str, Any]:
        return {"kind": self.kind, **{row.name: _data(getattr(self, row.name)) for row in fields(self)}}


@dataclass(frozen=True, slots=True)
class Said(Cause):
    """A reason as text alone."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class WrongOp(Cause):
    """Another op, or none, where one of `ops` is required."""

    kind: ClassVar[str] = "wrong-op"
    found: Any
    ops: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class WrongOperand(Cause):
    """An operand is not of the required kind, such as a constant. `name` is the pattern's."""

    kind: ClassVar[str] = "wrong-operand"
    found: Any
    wanted: LeafKind
    name: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class WrongValue(Cause):
    """A plain value differs from the required one."""

    kind: ClassVar[str] = "wrong-value"
    found: Any
    wanted: Any
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class WrongType(Cause):
    """A tensor has another dtype or rank than required; empty is any."""

    kind: ClassVar[str] = "wrong-type"
    value: fx.Node
    found: TensorType
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    text: str

    @property
    def is_rank(self) -> bool:
        """True if the rank is what differs."""
        return bool(self.ranks) and len(self.found.shape) not in self.ranks

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class UnknownType(Cause):
    """A tensor whose type matters has no known type."""

    kind: ClassVar[str] = "unknown-type"
    value: fx.Node
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class WrittenTo(Cause):
    """A tensor is written to in place, or may be."""

    kind: ClassVar[str] = "written-to"
    value: fx.Node
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Fault:
    """One argument that fails its check."""

    argument: str
    found: Any
    wanted: Check


@dataclass(frozen=True, slots=True)
class WrongArguments(Cause):
    """Arguments of a node fail their checks."""

    kind: ClassVar[str] = "wrong-arguments"
    node: fx.Node
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        first = self.faults[0]
        return f"{self.node.name} has {first.argument} = {first.found!r}, wanted {first.argument} {first.wanted}"


@dataclass(frozen=True, slots=True)
class ComputedArgument(Cause):
    """An argument that must be a constant is computed."""

    kind: ClassVar[str] = "computed-argument"
    node: fx.Node
    argument: str
    wanted: Check

    def __str__(self) -> str:
        return f"{self.argument} of {self.node.name} is computed, wanted {self.argument} {self.wanted}"


@dataclass(frozen=True, slots=True)
class UsedElsewhere(Cause):
    """A node inside the match has a user outside it."""

    kind: ClassVar[str] = "used-elsewhere"
    node: fx.Node
    other: fx.Node

    def __str__(self) -> str:
        return f"{self.node.name} has {len(self.node.users)} users; {self.other.name} uses it too"


@dataclass(frozen=True, slots=True)
class NotFree(Cause):
    """A node is excluded from matching. `owner` is the reason."""

    kind: ClassVar[str] = "not-free"
    node: fx.Node
    owner: str

    def __str__(self) -> str:
        return f"{self.node.name} is {self.owner}"


@dataclass(frozen=True, slots=True)
class Claimed(Cause):
    """A rule fits by itself, but another has claimed one of its nodes."""

    kind: ClassVar[str] = "claimed"
    node: fx.Node
    rule: str
    root: fx.Node
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Condition(Cause):
    """A condition of the rule refuses. `condition` is its name; empty if it is not registered."""

    kind: ClassVar[str] = "condition"
    condition: str
    text: str

    def __str__(self) -> str:
        return self.text


def _data(value: Any) -> Any:
    """A field as a JSON value: nodes by name, checks as they print."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        return [_data(item) for item in value]
    if isinstance(value, Fault):
        return {"argument": value.argument, "found": _data(value.found), "wanted": str(value.wanted)}
    if isinstance(value, LeafKind):
        return value.value
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
