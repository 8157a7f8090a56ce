"""Schema validation of `.pt2` documents, field by field, before torch rebuilds a graph from them.

The walk follows torch's own schema: every value must have its field's declared type, and every text must pass its
field's rule. A field without a rule is refused, so a newer schema fails closed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache

from torch._export.serde import schema
from torch._export.serde.union import _Union

from quantc.capture.pt2.schema_rules import CUSTOM_OBJECT, KEYS, RULES, WHOLE, Json
from quantc.errors import LoadError

FLOAT_WORDS = ("Infinity", "-Infinity", "NaN")
UNTRUSTED = "do not use this file unless you know who made it; ask for one written by torch.export.save"
OBJECTS = "export the model without custom class objects; only tensors and plain values can be loaded"


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    """A position in the document: the value, its schema type, its owning field, and the path to it."""

    value: Json
    hint: object
    field: tuple[str, str]
    step: str = ""
    parent: Spot | None = None

    def child(self, value: Json, hint: object, step: str, field: tuple[str, str] | None = None) -> Spot:
        return Spot(value, hint, field or self.field, step, self)

    def path(self) -> str:
        steps: list[str] = []
        spot: Spot | None = self
        while spot is not None:
            steps.append(spot.step)
            spot = spot.parent
        return "".join(reversed(steps)).lstrip(".")


def vet(document: Json, cls: type, member: str) -> None:
    """LoadError unless a parsed JSON document fits a class of torch's schema and all its text is harmless."""
    stack = [Spot(document, cls, ("", ""))]
    while stack:
        spot = stack.pop()
        reason = _why_not(spot)
        if reason is not None:
            where = f"{member}, {spot.path() or 'top level'}"
            advice = OBJECTS if reason == CUSTOM_OBJECT else UNTRUSTED
            raise LoadError(f"the archive is not safe to load: a field {reason}", where=where, advice=advice)
        stack.extend(_children(spot))


def _why_not(spot: Spot) -> str | None:
    kind, _ = _kind(spot.hint)
    check = CHECKS[kind]
    return check(spot)


def _children(spot: Spot) -> Iterator[Spot]:
    kind, inner = _kind(spot.hint)
    value = spot.value
    match kind:
        case "optional" if value is not None:
            yield spot.child(value, inner, "")
        case "list" if isinstance(value, list):
            for index, item in enumerate(value):
                yield spot.child(item, inner, f"[{index}]")
        case "dict" if isinstance(value, dict):
            for key, item in value.items():
                yield spot.child(item, inner, f"[{key!r}]")
        case "record" | "union" if isinstance(value, dict) and isinstance(inner, type):
            hints = _hints(inner)
            for name in hints.keys() & value.keys():
                yield spot.child(value[name], hints[name], f".{name}", (inner.__name__, name))
        case _:
            return


@cache
def _hints(cls: type) -> dict[str, object]:
    names = {field.name for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls, globalns=dict(vars(schema)))
    return {name: hint for name, hint in hints.items() if name in names}


@cache
def _kind(hint: object) -> tuple[str, object]:
    """Check that a schema type hint requires, and the element type."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return "optional", next(part for part in arguments if part is not types.NoneType)
    if origin is list or origin is dict:
        return origin.__name__, arguments[-1]
    if not isinstance(hint, type):
        return "unknown", hint
    if issubclass(hint, IntEnum):
        return "enum", hint
    if issubclass(hint, _Union):
        return "union", hint
    if dataclasses.is_dataclass(hint):
        return "record", hint
    return (hint.__name__ if hint in (str, int, float, bool) else "unknown"), hint


def _check_text(spot: Spot) -> str | None:
    if not isinstance(spot.value, str):
        return _not("text", spot)
    rule = RULES.get(spot.field)
    return rule(spot.value) if rule else "is text that this version does not know how to check"


def _check_int(spot: Spot) -> str | None:
    fits = type(spot.value) is int and -(2**63) <= spot.value < 2**64
    return None if fits else _not("a 64-bit integer", spot)


def _check_float(spot: Spot) -> str | None:
    fits = type(spot.value) in (int, float) or spot.value in FLOAT_WORDS
    return None if fits else _not("a number", spot)


def _check_bool(spot: Spot) -> str | None:
    return None if isinstance(spot.value, bool) else _not("true or false", spot)


def _check_enum(spot: Spot) -> str | None:
    _, cls = _kind(spot.hint)
    members = {int(member) for member in cls} if isinstance(cls, type) and issubclass(cls, IntEnum) else set()
    return None if type(spot.value) is int and spot.value in members else _not(f"one of {cls}", spot)


def _check_list(spot: Spot) -> str | None:
    return _whole(spot) if isinstance(spot.value, list) else _not("a list", spot)


def _check_dict(spot: Spot) -> str | None:
    if not isinstance(spot.value, dict):
        return _not("a table", spot)
    rule = KEYS.get(spot.field)
    if rule is None:
        return "is a table that this version does not know how to check"
    return next((reason for key in spot.value if (reason := rule(key))), None) or _whole(spot)


def _check_union(spot: Spot) -> str | None:
    _, cls = _kind(spot.hint)
    if not isinstance(spot.value, dict) or not isinstance(cls, type) or len(spot.value) != 1:
        return _not("a table with one entry", spot)
    unknown = spot.value.keys() - _hints(cls).keys()
    return f"holds the unknown entry {min(unknown)[:60]!r}" if unknown else _whole(spot)


def _check_record(spot: Spot) -> str | None:
    _, cls = _kind(spot.hint)
    if not isinstance(spot.value, dict) or not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        return _not("a table", spot)
    missing = {field.name for field in dataclasses.fields(cls) if _is_required(field)} - spot.value.keys()
    return f"lacks the entry {min(missing)!r}" if missing else _whole(spot)


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _whole(spot: Spot) -> str | None:
    check = WHOLE.get(spot.field)
    return check(spot.value) if check else None


def _not(expected: str, spot: Spot) -> str:
    return f"should be {expected}, but holds {type(spot.value).__name__} {str(spot.value)[:40]!r}"


def _check_unknown(_: Spot) -> str | None:
    return "has a type that this version does not know how to check"


CHECKS: dict[str, Callable[[Spot], str | None]] = {
    "optional": lambda _: None,
    "list": _check_list,
    "dict": _check_dict,
    "union": _check_union,
    "record": _check_record,
    "enum": _check_enum,
    "str": _check_text,
    "int": _check_int,
    "float": _check_float,
    "bool": _check_bool,
    "unknown": _check_unknown,
}
