"""Writes plain data as TOML; the standard library only reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantc.errors import ConfigError

BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(data: Mapping[str, Any]) -> str:
    """A mapping as TOML: lists of mappings become `[[tables]]`, everything nested deeper is written inline."""
    plain = {name: value for name, value in data.items() if not _is_table_list(value)}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, tables in data.items():
        if name in plain:
            continue
        for table in tables:
            lines += ["", f"[[{_key(name)}]]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    # JSON's escapes are TOML's, but JSON lets DEL stand
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise ConfigError(f"{value!r} cannot be written as TOML", advice="save it as .json")
