"""Pytree specs of inputs and outputs as text: `((*, [*]), {"mask": *})`, where `*` is a leaf.

A class other than tuple, list and dict is written `module:Class[context](parts)`. Reading resolves classes among those
registered with pytree and the modules already loaded; it imports nothing, whatever the text names. (torch's own reader
of specs imports modules that the text names.)
"""

from __future__ import annotations

import keyword
import sys
from collections import namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from quantc.text.lexer import DEPTH, Reader, Token
from quantc.text.literals import Opaque, format_value, no_nodes


def write_spec(spec: pytree.TreeSpec) -> str:
    """The text of a spec."""
    if spec.is_leaf():
        return "*"
    parts = [write_spec(child) for child in spec.children()]
    if spec.type is tuple:
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    if spec.type is list:
        return f"[{', '.join(parts)}]"
    if spec.type is dict:
        keys = [format_value(key, no_nodes) for key in spec.context]
        return f"{{{', '.join(f'{key}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
    if spec.type is namedtuple:
        return f"{_class_name(spec.context)}({', '.join(parts)})"
    context = "" if spec.context is None else f"[{format_value(spec.context, no_nodes)}]"
    return f"{_class_name(spec.type)}{context}({', '.join(parts)})"


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def keyword_names(spec: pytree.TreeSpec) -> list[Any]:
    """The names of the keyword arguments in a spec of `(args, kwargs)`."""
    if spec.type is not tuple or spec.num_children != 2 or spec.child(1).type is not dict:
        return []
    return list(spec.child(1).context)


def is_name(text: object) -> bool:
    """True if generated code may use this text as an identifier."""
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def read_spec(reader: Reader, depth: int = 0) -> pytree.TreeSpec:
    """The inverse of `write_spec`."""
    token = reader.take()
    if depth > DEPTH:
        reader.fail("the arrangement nests too deeply", at=token.start)
    if token.text == "*":
        return pytree.treespec_leaf()
    if token.text == "(":
        return pytree.TreeSpec(tuple, None, _parts(reader, ")", depth))
    if token.text == "[":
        return pytree.TreeSpec(list, None, _parts(reader, "]", depth))
    if token.text == "{":
        return _dict(reader, token, depth)
    if token.kind != "word" or ":" not in token.text:
        reader.fail("expected *, a bracket, or a class such as collections:OrderedDict", at=token.start)
    return _instance(reader, token, depth)


def _parts(reader: Reader, closing: str, depth: int) -> list[pytree.TreeSpec]:
    parts: list[pytree.TreeSpec] = []
    while not reader.accept(closing):
        parts.append(read_spec(reader, depth + 1))
        if not reader.accept(","):
            reader.require(closing)
            break
    return parts


def _dict(reader: Reader, token: Token, depth: int) -> pytree.TreeSpec:
    rows: dict[Any, pytree.TreeSpec] = {}
    while not reader.accept("}"):
        key = reader.value()
        if not isinstance(key, str | int | float | None) or key in rows:
            reader.fail(f"{key!r} is not a key, or is given twice", at=token.start)
        reader.require(":")
        rows[key] = read_spec(reader, depth + 1)
        if not reader.accept(","):
            reader.require("}")
            break
    return pytree.TreeSpec(dict, list(rows), list(rows.values()))


def _instance(reader: Reader, token: Token, depth: int) -> pytree.TreeSpec:
    kind = {_class_name(known): known for known in pytree.SUPPORTED_NODES}.get(token.text)
    kind = kind or _loaded_namedtuple(token.text)
    if kind is None:
        reader.fail(
            f"the class {token.text} is not known here",
            at=token.start,
            advice="import the module that defines it, and register it with pytree, before reading",
        )
    context: Any = None
    if reader.accept("["):
        context = reader.value()
        reader.require("]")
    if _holds_opaque(context):
        reader.fail(f"this {token.text} holds something that text cannot carry", at=token.start)
    reader.require("(")
    parts = _parts(reader, ")", depth)
    if not pytree.is_namedtuple_class(kind) or kind in pytree.SUPPORTED_NODES:
        return pytree.TreeSpec(kind, context, parts)
    if len(parts) != len(kind._fields):
        reader.fail(f"{token.text} has other fields", at=token.start)
    return pytree.TreeSpec(namedtuple, kind, parts)


def _loaded_namedtuple(name: str) -> type | None:
    """A namedtuple class of an already loaded module, resolved without running any code."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if pytree.is_namedtuple_class(found) else None


def _holds_opaque(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_opaque(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_opaque(item) for item in value.values())
    return isinstance(value, Opaque)
