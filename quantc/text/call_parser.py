"""Parser of a call in dump text: arguments, bound to the positions of the op's schema, and attributes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from quantc.errors import suggest
from quantc.ir.dialect import Argument, arguments
from quantc.ir.sites import ModeValue, Origin
from quantc.text.lexer import Reader, Token
from quantc.text.pytree_text import is_name

_ORIGIN = re.compile(r"(?P<path>\S*)(?:(?:^| ): (?P<type>\S+))?(?:(?:^| )@ (?P<file>\S+):(?P<line>\d{1,9}))?")
_CONTAINERS = (tuple, list, dict)


def read_arguments(reader: Reader) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as written: positional, then by name."""
    reader.require("(")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    while not reader.accept(")"):
        start = reader.position
        token = reader.take()
        if token.kind == "word" and reader.accept("="):
            if token.text in kwargs or not is_name(token.text):
                reader.fail(f"the argument {token.text!r} is given twice or is no name", at=token.start)
            kwargs[token.text] = reader.value()
        else:
            reader.position = start
            if kwargs:
                reader.fail("arguments by position come before those by name", at=token.start)
            args.append(reader.value())
        if not reader.accept(","):
            reader.require(")")
            break
    return tuple(args), kwargs


def read_mode(reader: Reader, rows: dict[str, Any]) -> ModeValue | None:
    if "mode_arg" not in rows:
        return None
    position, train, evaluate = rows["mode_arg"], rows.get("train"), rows.get("eval")
    if type(position) is not int or position < 0:
        reader.fail("mode_arg= is the position of an argument")
    if not isinstance(train, bool | float | int) or not isinstance(evaluate, bool | float | int):
        reader.fail("train= and eval= are the values an argument takes")
    return ModeValue(position, train, evaluate)


def read_attributes(reader: Reader, *allowed: str) -> dict[str, Any]:
    """Parse `{key=value, ...}` at the end of a line."""
    rows: dict[str, Any] = {}
    if not reader.accept("{"):
        return rows
    while not reader.accept("}"):
        key = reader.expect("word", what="an attribute such as counter=")
        if key.text not in allowed or key.text in rows:
            reader.fail(f"{key.text!r} is not known here", at=key.start, advice=suggest(key.text, allowed))
        reader.require("=")
        rows[key.text] = reader.value()
        if not reader.accept(","):
            reader.require("}")
            break
    return rows


def read_origin(text: str) -> Origin:
    """Parse an origin; text of another form is kept as the module path, so that it prints the same again."""
    found = _ORIGIN.fullmatch(text)
    if found is not None:
        line = int(found["line"] or 0)
        origin = Origin(found["path"], found["type"] or "", found["file"] or "", line)
        if str(origin) == text:
            return origin
    return Origin(module_path=text)


def is_method(name: str) -> bool:
    if name.startswith("_"):
        return False
    return hasattr(torch.Tensor, name) or any(hasattr(kind, name) for kind in _CONTAINERS)


def check_getattr(reader: Reader, callee: Token, args: tuple[Any, ...]) -> None:
    """Raise ParseError unless a `getattr` reads a public tensor attribute."""
    name = args[1] if len(args) > 1 else None
    if not isinstance(name, str) or name.startswith("_") or not hasattr(torch.Tensor, name):
        reader.fail(f"getattr may only read what a tensor has, not {name!r}", at=callee.start)


@cache
def _positions(target: OpOverload) -> dict[str, int]:
    """Argument positions by dialect name and by ATen name."""
    rows = arguments(target)
    names = {row.aten_name: index for index, row in enumerate(rows)}
    names.update({row.name: index for index, row in enumerate(rows)})
    return names


def by_schema(
    reader: Reader, callee: Token, target: OpOverload, given: tuple[Any, ...], named: dict[str, Any], at_least: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments bound by schema: defaults fill gaps, and only keyword-only arguments stay keywords."""
    rows = arguments(target)
    if len(given) > len(rows):
        reader.fail(f"{callee.text} takes {len(rows)} arguments, not {len(given)}", at=callee.start)
    values = dict(enumerate(given))
    for name, value in named.items():
        index = _positions(target).get(name)
        if index is None or index in values:
            what = f"{callee.text} has no argument {name!r}" if index is None else f"{name!r} is given twice"
            reader.fail(what, at=callee.start, advice=suggest(name, _positions(target), noun="arguments"))
        values[index] = value
    for index, row in enumerate(rows):
        if index not in values and not row.has_default:
            reader.fail(f"{callee.text} needs the argument {row.name!r}", at=callee.start)
    last = max([index for index in values if not rows[index].keyword_only] + [min(at_least, len(rows) - 1)])
    args = tuple(values.get(index, _default(rows[index])) for index in range(last + 1) if not rows[index].keyword_only)
    return args, {rows[index].aten_name: value for index, value in values.items() if rows[index].keyword_only}


def _default(row: Argument) -> Any:
    return list(row.default) if isinstance(row.default, list) else row.default
