"""Rule tables as JSON, parsed strictly: anything unknown is an error that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

import torch

from quantc.errors import PatternError, suggest
from quantc.ir.types import DTYPE_NAMES, DTYPES
from quantc.patterns.checks import Check, Comparison, Plain
from quantc.patterns.dsl import (
    MAX_DEPTH,
    AnyOf,
    Chain,
    Items,
    Operand,
    OpPattern,
    OptionalNode,
    Pattern,
    Result,
    Shared,
    check_name,
)
from quantc.patterns.operand_patterns import Leaf, LeafKind, LiteralValue, leaf
from quantc.patterns.rule import Rule, Rules
from quantc.spec.formats import Offer

T = TypeVar("T")
Choice = TypeVar("Choice", bound=StrEnum)

FORMAT = "quantc-rules"
VERSION = 1
MAX_NESTING = 2 * MAX_DEPTH + 2
COMPARISONS = {comparison.value: comparison for comparison in Comparison}
OFFERS = {"static": Offer.YES, "dynamic": Offer.NO}
"""The default offers of a rule."""
KINDS = ("op", "chain", "optional", "any_of", "result", "shared", "value", "const", "number", "literal")


# -- writing -----------------------------------------------------------------------------------------------------


def to_json(table: Rules) -> str:
    data = {
        "format": FORMAT,
        "version": VERSION,
        "name": table.name,
        "rules": [_rule_to_data(rule) for rule in table.rules],
    }
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)


def _rule_to_data(rule: Rule) -> dict[str, Any]:
    unnamed = next((condition for condition in rule.conditions if not isinstance(condition, str)), None)
    if unnamed is not None:
        raise PatternError(
            f"the condition {getattr(unnamed, '__qualname__', unnamed)!r} of rule {rule.name!r} has no name to write",
            advice='register it: @predicate("its-name") above the function',
        )
    data: dict[str, Any] = {"name": rule.name, "pattern": operand_to_data(rule.pattern)}
    if rule.roles:
        data["roles"] = dict(rule.roles)
    if rule.conditions:
        data["when"] = list(rule.conditions)
    if rule.supports:
        data["supports"] = sorted(rule.supports)
    offers: dict[str, Offer] = {name: getattr(rule, name) for name in OFFERS}
    data |= {name: offer.value for name, offer in offers.items() if offer is not OFFERS[name]}
    return data


def operand_to_data(pattern: Operand) -> Any:
    """A pattern as plain lists, dicts and strings."""
    match pattern:
        case Leaf():
            return _leaf_to_data(pattern)
        case LiteralValue(value=value):
            return {"literal": _plain_to_data(value)}
        case OpPattern():
            return _op_to_data(pattern)
        case Chain(steps=steps):
            return {"chain": [operand_to_data(step) for step in steps]}
        case OptionalNode(inner=inner):
            return {"optional": operand_to_data(inner)}
        case AnyOf(options=options):
            return {"any_of": [operand_to_data(option) for option in options]}
        case Result(inner=inner, index=index, name=name):
            data = {"result": operand_to_data(inner), "index": index, "name": name}
            return {key: value for key, value in data.items() if value is not None}
        case Shared(inner=inner):
            return {"shared": operand_to_data(inner)}
        case Items(items=items):
            return [operand_to_data(item) for item in items]
        case _:
            raise PatternError(f"{pattern!r} is not a pattern")


def _leaf_to_data(item: Leaf) -> Any:
    if item.kind is LeafKind.LIST or (item.kind is LeafKind.VALUE and not item.dtypes and not item.ranks):
        return item.token
    data: dict[str, Any] = {item.kind.value: item.token}
    if item.dtypes:
        data["dtype"] = list(item.dtypes)
    if item.ranks:
        data["rank"] = list(item.ranks)
    return data


def _op_to_data(pattern: OpPattern) -> dict[str, Any]:
    data: dict[str, Any] = {"op": list(pattern.ops)}
    if pattern.operands:
        data["args"] = [operand_to_data(operand) for operand in pattern.operands]
    if pattern.where:
        data["where"] = {name: {check.comparison.value: _plain_to_data(check.value)} for name, check in pattern.where}
    if pattern.name is not None:
        data["name"] = pattern.name
    return data


def _plain_to_data(value: Plain) -> Any:
    if isinstance(value, tuple):
        return [_plain_to_data(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": DTYPE_NAMES[value]}
    if isinstance(value, float) and math.isinf(value):
        return {"float": "inf" if value > 0 else "-inf"}
    return value


# -- reading -----------------------------------------------------------------------------------------------------


def from_json(text: str | bytes, make: Callable[[str, tuple[Rule, ...]], T]) -> T:
    """Read a text: `make` builds the value from its name and rules."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise PatternError("the JSON is nested too deeply", advice="split the rule into several") from None
    except ValueError as error:
        raise PatternError(f"this is not JSON: {error}", advice="write tables with RuleTable.to_json()") from None
    fields = _fields(data, "table", required=("format", "version", "name", "rules"))
    if fields["format"] != FORMAT or type(fields["version"]) is not int or fields["version"] != VERSION:
        found = f"{fields['format']!r} version {fields['version']!r}"
        raise PatternError(f"this is {found}, not {FORMAT!r} version {VERSION}", where="format, version")
    rules = [_rule(item, f"rules[{index}]") for index, item in enumerate(_list(fields["rules"], "rules"))]
    with _at("rules"):
        return make(_text(fields["name"], "name"), tuple(rules))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return data


def _rule(data: Any, path: str) -> Rule:
    fields = _fields(data, path, required=("name", "pattern"), optional=("roles", "when", "supports", *OFFERS))
    pattern = _operand(fields["pattern"], f"{path}.pattern", 0)
    if not isinstance(pattern, Pattern) or isinstance(pattern, Items):
        raise PatternError(f"{pattern} is an operand, not a pattern over nodes", where=f"{path}.pattern")
    roles = _mapping(fields.get("roles", {}), f"{path}.roles")
    conditions = _texts(fields.get("when", []), f"{path}.when")
    supports = _texts(fields.get("supports", []), f"{path}.supports")
    offers = {name: _one_of(Offer, fields.get(name, usual.value), f"{path}.{name}") for name, usual in OFFERS.items()}
    with _at(path):
        return Rule(
            _text(fields["name"], f"{path}.name"),
            pattern,
            roles={name: _text(role, f"{path}.roles.{name}") for name, role in roles.items()},
            when=conditions,
            supports=frozenset(supports),
            **offers,
        )


def _operand(data: Any, path: str, nesting: int) -> Operand:
    if nesting > MAX_NESTING:
        raise PatternError("the pattern is nested too deeply", where=path[:200], advice="split the rule into several")
    if isinstance(data, str):
        with _at(path):
            return leaf(data)
    if isinstance(data, list):
        items = _operands(data, path, nesting)
        with _at(path):
            return Items(items)
    fields = _mapping(data, path)
    kind = next((kind for kind in KINDS if kind in fields), None)
    if kind is None:
        given = ", ".join(map(repr, fields)) or "no key"
        raise PatternError(f"{given} says no kind of pattern", where=path, advice=f"one of {', '.join(KINDS)}")
    with _at(path):
        return _of_kind(kind, fields, path, nesting)


def _of_kind(kind: str, fields: dict[str, Any], path: str, nesting: int) -> Operand:
    inner = f"{path}.{kind}"
    match kind:
        case "op":
            return _op(fields, path, nesting)
        case "value" | "const" | "number":
            _fields(fields, path, required=(kind,), optional=("dtype", "rank"))
            dtypes = _texts(fields.get("dtype", []), f"{path}.dtype")
            ranks = [_integer(rank, f"{path}.rank") for rank in _list(fields.get("rank", []), f"{path}.rank")]
            return leaf(_text(fields[kind], inner), LeafKind(kind), dtypes, ranks)
        case "literal":
            _fields(fields, path, required=(kind,))
            return LiteralValue(_plain(fields[kind], inner, nesting))
        case "chain" | "any_of":
            _fields(fields, path, required=(kind,))
            parts = _operands(_list(fields[kind], inner), inner, nesting)
            return AnyOf(parts) if kind == "any_of" else Chain(tuple(_as_node(part, inner) for part in parts))
        case _:
            extra = ("index", "name") if kind == "result" else ()
            _fields(fields, path, required=(kind,), optional=extra)
            part = _as_node(_operand(fields[kind], inner, nesting + 1), inner)
            if kind == "optional":
                return OptionalNode(part)
            if kind == "shared":
                return Shared(part)
            index = _integer(fields["index"], f"{path}.index") if "index" in fields else None
            return Result(part, index, _name(fields, path))


def _op(fields: dict[str, Any], path: str, nesting: int) -> OpPattern:
    _fields(fields, path, required=("op",), optional=("args", "where", "name"))
    names = tuple(_texts(fields["op"], f"{path}.op"))
    operands = _operands(_list(fields.get("args", []), f"{path}.args"), f"{path}.args", nesting)
    where = tuple(
        (name, _check(check, f"{path}.where.{name}", nesting))
        for name, check in _mapping(fields.get("where", {}), f"{path}.where").items()
    )
    return OpPattern(names, operands, where, _name(fields, path))


def _name(fields: dict[str, Any], path: str) -> str | None:
    return check_name(_text(fields["name"], f"{path}.name")) if "name" in fields else None


def _operands(items: list[Any], path: str, nesting: int) -> tuple[Operand, ...]:
    return tuple(_operand(item, f"{path}[{index}]", nesting + 1) for index, item in enumerate(items))


def _as_node(part: Operand, path: str) -> Pattern:
    if isinstance(part, Pattern):
        return part
    raise PatternError(f"{part} is a value, not a node", where=path)


def _check(data: Any, path: str, nesting: int) -> Check:
    fields = _mapping(data, path)
    if len(fields) != 1:
        raise PatternError("a check has exactly one comparison", where=path, advice=f"one of {', '.join(COMPARISONS)}")
    name, value = next(iter(fields.items()))
    if name not in COMPARISONS:
        raise PatternError(
            f"unknown comparison {name!r}", where=path, advice=suggest(name, COMPARISONS, noun="comparisons")
        )
    with _at(path):
        return Check(COMPARISONS[name], _plain(value, f"{path}.{name}", nesting))


def _plain(data: Any, path: str, nesting: int) -> Plain:
    if nesting > MAX_NESTING:
        raise PatternError("the value is nested too deeply", where=path[:200])
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return tuple(_plain(item, f"{path}[{index}]", nesting + 1) for index, item in enumerate(data))
    match data:
        case {"dtype": str(name), **rest} if not rest and name in DTYPES:
            return DTYPES[name]
        case {"float": "inf" | "-inf" as sign, **rest} if not rest:
            return float(sign)
        case _:
            raise PatternError(
                f"{data!r} is not a value", where=path, advice='null, true, 1, "text", [1, 2] or {"dtype": "f32"}'
            )


# -- the fields of objects ---------------------------------------------------------------------------------------


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Attach the JSON path to an error, unless it has one."""
    try:
        yield
    except PatternError as error:
        if error.where is not None and not error.where.startswith("rule "):
            raise
        raise PatternError(error.what, where=path, advice=error.advice) from error


def _fields(data: Any, path: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    fields = _mapping(data, path)
    for name in required:
        if name not in fields:
            raise PatternError(f"the field {name!r} is missing", where=path)
    for name in fields:
        if name not in (*required, *optional):
            raise PatternError(
                f"unknown field {name!r} here",
                where=f"{path}.{name}",
                advice=suggest(name, (*required, *optional), noun="fields"),
            )
    return fields


def _mapping(data: Any, path: str) -> dict[str, Any]:
    if isinstance(data, dict):
        return data
    raise _wrong("an object", data, path)


def _list(data: Any, path: str) -> list[Any]:
    if isinstance(data, list):
        return data
    raise _wrong("a list", data, path)


def _text(data: Any, path: str) -> str:
    if isinstance(data, str):
        return data
    raise _wrong("a string", data, path)


def _texts(data: Any, path: str) -> list[str]:
    return [_text(item, f"{path}[{index}]") for index, item in enumerate(_list(data, path))]


def _one_of(kind: type[Choice], data: Any, path: str) -> Choice:
    known = [item.value for item in kind]
    if data not in known:
        raise PatternError(f"{data!r} is none of {', '.join(known)}", where=path, advice=f"write {known[0]!r}")
    return kind(data)


def _integer(data: Any, path: str) -> int:
    if type(data) is int:
        return data
    raise _wrong("a whole number", data, path)


def _wrong(wanted: str, data: Any, path: str) -> PatternError:
    shown = repr(data)
    return PatternError(f"expected {wanted}, found {shown if len(shown) < 60 else shown[:57] + '...'}", where=path)
