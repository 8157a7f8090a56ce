"""Validation of pytree specs before torch rebuilds the containers.

torch imports modules named in some specs (factories of `defaultdict`, enums used as keys), and writes the names of
keyword arguments into the code of `forward`.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator

from torch.utils import _pytree as pytree

from quantc.capture.pt2.expression_checks import is_quiet

FACTORIES = frozenset({"bool", "dict", "float", "int", "list", "set", "str", "tuple"})
UNNAMED = "NO_SERIALIZED_TYPE_NAME_FOUND"
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Json = object


def why_not_treespec(text: str) -> str | None:
    """Reason why torch may not rebuild these containers; None if it may."""
    root = _root(text)
    return root if isinstance(root, str) else next(_reasons(root), None)


def why_not_input_spec(text: str) -> str | None:
    """Like `why_not_treespec`, for inputs: keyword names must be plain identifiers as well."""
    return why_not_treespec(text) or next(_odd_keywords(_root(text)), None)


def _root(text: str) -> dict[str, Json] | str:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return "describes containers in text that is not JSON"
    match parsed:
        case [1, dict(root)]:
            return root
        case _:
            return "describes containers in a form this version does not know"


def _reasons(root: dict[str, Json]) -> Iterator[str]:
    stack: list[Json] = [root]
    while stack:
        match stack.pop():
            case {"type": None, "context": None, "children_spec": []}:
                continue
            case {"type": str(name), "context": context, "children_spec": list(children)}:
                if reason := _why_not_container(name, context):
                    yield reason
                stack.extend(children)
            case _:
                yield "describes a container without type, context and children"


def _why_not_container(name: str, context: Json) -> str | None:
    if name == UNNAMED or name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        return f"uses the container `{name[:80]}`, which is not registered (import the module that defines it first)"
    if name == "collections.namedtuple":
        known = isinstance(context, str) and context in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
        return None if known else f"uses the named tuple `{str(context)[:80]}`, which is not registered"
    if name == "collections.defaultdict":
        return _why_not_defaultdict(context)
    if not isinstance(context, str):
        return _why_not_values(context)
    try:
        return _why_not_values(json.loads(context))
    except (ValueError, RecursionError):
        return f"describes a `{name}` in text that is not JSON"


def _why_not_defaultdict(context: Json) -> str | None:
    match context:
        case {"default_factory_module": "builtins", "default_factory_name": str(factory), "dict_context": keys}:
            return _why_not_values(keys) if factory in FACTORIES else f"names the factory `{factory[:60]}`"
        case _:
            return "uses a defaultdict whose factory is not a builtin container or number"


def _why_not_values(value: Json) -> str | None:
    """Keys and field names: plain values, with no text that could end a string in generated code."""
    stack = [value]
    while stack:
        match stack.pop():
            case str(text) if not is_quiet(text):
                return "has a key with quotes, backslashes or control characters, which torch pastes into code"
            case list(items):
                stack.extend(items)
            case {"__enum__": _}:
                return "has an enum as a key, which torch would import by name"
            case dict(table):
                stack.extend([*table.keys(), *table.values()])
            case _:
                continue
    return None


def _odd_keywords(root: dict[str, Json] | str) -> Iterator[str]:
    match root:
        case {"type": "builtins.tuple", "children_spec": [_, {"type": "builtins.dict", "context": str(context)}]}:
            names = json.loads(context)
        case _:
            return
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or not WORD.fullmatch(name) or keyword.iskeyword(name):
            yield f"names a keyword argument `{str(name)[:60]}`, not a plain name"
