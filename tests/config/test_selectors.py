"""Selectors as data: what they match, how they print, and which keys users may give."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import TypeAdapter
from torch import nn

from quantc.config.selectors import (
    AnySelector,
    ByAll,
    ByEdge,
    ByModule,
    ByNode,
    ByOp,
    ByRegex,
    ByType,
    Selector,
    ancestors,
    graphs_around,
    selector_of,
)
from quantc.errors import ConfigError

ADAPTER: TypeAdapter[AnySelector] = TypeAdapter(Selector)
ALL: list[tuple[AnySelector, str]] = [
    (ByModule(path="layer*.conv"), "layer*.conv"),
    (ByRegex(pattern=r"layer\d"), r"/layer\d/"),
    (ByType(name="Linear"), "type Linear"),
    (ByOp(op="add"), "op add"),
    (ByNode(node="add_1"), "node add_1"),
    (ByEdge(producer="relu", consumer="add"), "edge relu -> add"),
    (ByAll(), "everything"),
]


@pytest.mark.parametrize(("selector", "text"), ALL, ids=str)
def test_selectors_are_values_that_round_trip_and_print(selector: AnySelector, text: str) -> None:
    assert ADAPTER.validate_json(ADAPTER.dump_json(selector)) == selector
    assert hash(ADAPTER.validate_python(selector.model_dump())) == hash(selector)
    assert str(selector) == text


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layer1", "layer1", True),
        ("layer1", "layer1.0", False),
        ("layer*.conv", "layer1.0.conv", True),
        ("layer?", "layer10", False),
        ("Layer1", "layer1", False),
        ("layer[12]", "layer2", True),
    ],
)
def test_a_path_is_matched_as_a_whole_by_a_glob(pattern: str, path: str, expected: bool) -> None:
    assert ByModule(path=pattern).matches(path) is expected


def test_a_regular_expression_matches_the_whole_path() -> None:
    assert ByRegex(pattern=r"layer\d").matches("layer1")
    assert not ByRegex(pattern=r"layer\d").matches("layer10")
    assert not ByRegex(pattern=r"ayer\d").matches("layer1")
    with pytest.raises(ConfigError, match="pattern"):
        ByRegex(pattern="(")


def test_a_type_matches_its_full_or_its_last_name() -> None:
    full = "torch.nn.modules.linear.Linear"
    assert ByType.of(nn.Linear).matches(full)
    assert not ByType.of(nn.Linear).matches("my.Linear")
    assert ByType(name="Linear").matches(full)
    assert ByType(name="Linear").matches("Linear")
    assert not ByType(name="linear.Linear").matches(full)


def test_a_star_after_a_nested_graph_is_all_of_it() -> None:
    assert ByNode(node="true_graph_0/*").graph == "true_graph_0"
    assert ByNode(node="a/b/*").graph == "a/b"
    assert ByNode(node="true_graph_0/relu").graph is None


def test_keys_are_paths_patterns_classes_and_selectors() -> None:
    own = ByOp(op="add")
    keys: list[tuple[Any, AnySelector]] = [
        ("layer1", ByModule(path="layer1")),
        (re.compile("a.*"), ByRegex(pattern="a.*")),
        (nn.Linear, ByType(name="torch.nn.modules.linear.Linear")),
        (own, own),
    ]
    assert [selector_of(key) for key, _ in keys] == [expected for _, expected in keys]


@pytest.mark.parametrize("key", [3, None, int, nn.Linear(1, 1), ""], ids=str)
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(ConfigError):
        selector_of(key)


def test_modules_and_graphs_are_listed_outermost_first() -> None:
    assert ancestors("layer1.0.conv") == ("layer1", "layer1.0", "layer1.0.conv")
    assert ancestors("") == ("",)
    assert graphs_around("a/b/relu") == ["a", "a/b"]
    assert graphs_around("relu") == []
