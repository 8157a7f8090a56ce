"""Container descriptions: those that torch writes pass, and those that would import or paste something do not."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from quantc.capture.pt2.treespec_checks import why_not_input_spec, why_not_treespec

Pair = namedtuple("Pair", ["first", "second"])
pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")


def written(tree: Any) -> str:
    """The description that torch itself writes of a container."""
    return pytree.treespec_dumps(pytree.tree_structure(tree))


TREES = [
    0,
    (),
    [1, (2, None)],
    {"a": 1, "b": {"c": [2]}},
    OrderedDict(x=1, y=2),
    defaultdict(list, k=[1]),
    Pair(1, {"z": 2}),
    {1: "one", 2.5: "more"},
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_descriptions_that_torch_writes_are_taken(tree: Any) -> None:
    assert why_not_treespec(written(tree)) is None


def leaf() -> dict[str, Any]:
    return {"type": None, "context": None, "children_spec": []}


def node(kind: str, context: Any, *children: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


BAD: dict[str, tuple[Any, str]] = {
    "unknown type": (node("os.system", "null"), "os.system"),
    "unnamed type": (node("NO_SERIALIZED_TYPE_NAME_FOUND", "null"), "not registered"),
    "nested": (node("builtins.list", "null", node("my.Own", "null")), "my.Own"),
    "factory of a module": (
        node(
            "collections.defaultdict",
            {"default_factory_module": "os", "default_factory_name": "system", "dict_context": []},
        ),
        "factory",
    ),
    "foreign factory": (
        node(
            "collections.defaultdict",
            {"default_factory_module": "builtins", "default_factory_name": "eval", "dict_context": []},
        ),
        "eval",
    ),
    "enum key": (node("builtins.dict", '[{"__enum__": true, "fqn": "os.x", "name": "y"}]', leaf()), "enum"),
    "quoted key": (node("builtins.dict", json.dumps(["a'b"]), leaf()), "quotes"),
    "key that is not json": (node("builtins.dict", "[", leaf()), "not JSON"),
    "named tuple": (node("collections.namedtuple", "some.Tuple"), "some.Tuple"),
    "no children": ({"type": "builtins.list", "context": "null"}, "without type"),
}


@pytest.mark.parametrize("name", BAD)
def test_descriptions_that_would_import_or_paste_are_refused(name: str) -> None:
    root, told = BAD[name]
    assert told in (why_not_treespec(json.dumps([1, root])) or "")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[2, {}]", "[1]", '"x"'])
def test_other_text_is_refused(text: str) -> None:
    assert "describes containers" in (why_not_treespec(text) or "")


@pytest.mark.parametrize("name", ["x", "_mask2"])
def test_keywords_of_inputs_are_plain_names(name: str) -> None:
    assert why_not_input_spec(written(((1,), {name: 2}))) is None


@pytest.mark.parametrize("name", ["for", "a b", "1x", "x=y"])
def test_other_keywords_are_refused_in_inputs_alone(name: str) -> None:
    text = written(((1,), {name: 2}))
    assert name in (why_not_input_spec(text) or "")
    assert why_not_treespec(text) is None  # as an output it is a key
