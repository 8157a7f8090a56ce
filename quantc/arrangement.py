"""How inputs and outputs are arranged (pytree specs), read from text that may be hostile.

torch's own reader imports whatever module an enum key or a defaultdict's factory names. Here those are refused
before it sees them.
"""

from __future__ import annotations

import json
import keyword
from typing import Any

from torch.utils import _pytree as pytree

ADVICE = (
    "register the class with torch.utils._pytree (or torch.export.register_dataclass) under a serialized_type_name "
    "before dumping and before parsing"
)
_DEPTH = 50
_KEYED = ("builtins.dict", "collections.OrderedDict", "torch.fx.immutable_collections.immutable_dict")
_REFUSED = ("collections.defaultdict",)


def write_spec(spec: pytree.TreeSpec) -> str:
    """JSON, or for a class that has no name in text, what it is; the latter does not parse back."""
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError):
        return f"opaque {json.dumps(str(spec))}"


def read_spec(text: str) -> pytree.TreeSpec:
    """The spec that `write_spec` wrote. Raises ValueError on anything else; imports and executes nothing."""
    if text.startswith("opaque "):
        raise ValueError(f"this arrangement holds a class that has no name in text: {text.removeprefix('opaque ')}")
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("the arrangement nests too deeply") from None
    match document:
        case [1, dict(schema)]:
            _check(schema)
        case _:
            raise ValueError("an arrangement is written [1, {...}]")
    try:
        return pytree.treespec_loads(text)
    except (KeyError, TypeError, ValueError, AssertionError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"the arrangement does not read: {error}") from None


def keyword_names(spec: pytree.TreeSpec) -> list[Any]:
    """The names of the keyword arguments in a spec of `(args, kwargs)`."""
    if spec.type is not tuple or spec.num_children != 2 or spec.child(1).type is not dict:
        return []
    return list(spec.child(1).context)


def is_name(text: object) -> bool:
    """Whether generated code may hold this as an identifier."""
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def _check(schema: dict[str, Any]) -> None:
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        item, depth = pending.pop()
        match item:
            case {"type": None, "context": None, "children_spec": []}:
                continue
            case {"type": str(kind), "context": context, "children_spec": list(children)} if depth < _DEPTH:
                _check_context(kind, context, len(children))
                pending.extend((child, depth + 1) for child in children)
            case _:
                raise ValueError('a part of an arrangement is written {"type", "context", "children_spec"}')


def _check_context(kind: str, context: Any, children: int) -> None:
    if kind in _REFUSED:
        raise ValueError(f"{kind} is not read from text")
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(kind)
    if known is None:
        raise ValueError(f"the class {kind!r} is not registered")
    if pytree.SUPPORTED_SERIALIZED_TYPES[known].from_dumpable_context is not None:
        return
    if not isinstance(context, str):
        raise ValueError(f"{kind} needs a context in JSON")
    try:
        inner = json.loads(context)
    except RecursionError:
        raise ValueError("the arrangement nests too deeply") from None
    if kind in _KEYED and not _are_keys(inner, children):
        raise ValueError(f"{kind} has {children} parts and needs as many different keys")
    if kind not in _KEYED and isinstance(inner, dict | list) and "__enum__" in json.dumps(inner):
        raise ValueError("an enum is not read from text")


def _are_keys(keys: Any, count: int) -> bool:
    if not isinstance(keys, list) or len(keys) != count:
        return False
    return all(isinstance(key, str | int | float | bool | None) for key in keys) and len(set(keys)) == count
