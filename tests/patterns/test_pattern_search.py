"""The backtracking search: goals, choice points, what is undone, and which failure is told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import fx

from quantc.patterns import Pattern, op
from quantc.patterns import aten as v
from quantc.patterns.dsl import Operand
from quantc.patterns.pattern_search import Core, NodeCore, Search
from quantc.patterns.refusals import Cause, Said
from tests.support.pattern_graphs import Build, refused


class Around:
    """A program in which nothing is constant and every node is free."""

    def is_constant(self, node: fx.Node) -> bool:
        return False

    def owner_of(self, node: fx.Node) -> Cause | None:
        return None


class Binds(Core):
    """Binds the value to a name, then asks for what follows."""

    def __init__(self, name: str, then: Core | None = None) -> None:
        super().__init__(0, None, frozenset(), frozenset())
        self.name, self.then = name, then

    def enter(self, search: Search, value: Any) -> bool:
        if self.then is not None:
            search.push(self.then, value)
        return search.bind(self.name, value)


class Fails(Core):
    def __init__(self, text: str) -> None:
        super().__init__(0, None, frozenset(), frozenset())
        self.text = text

    def enter(self, search: Search, value: Any) -> bool:
        return search.fail(value, lambda: Said(self.text))


class First(Core):
    """Tries one core, and another if that fails."""

    def __init__(self, one: Core, other: Core) -> None:
        super().__init__(0, None, frozenset(), frozenset())
        self.one, self.other = one, other

    def enter(self, search: Search, value: Any) -> bool:
        search.choose(self.other, value)
        search.push(self.one, value)
        return True


class Takes(NodeCore):
    """Claims the node; a later part fails or not."""

    def __init__(self, number: int, then: Core) -> None:
        super().__init__(number, None, frozenset(), frozenset())
        self.shared, self.then = False, then

    def enter(self, search: Search, value: Any) -> bool:
        search.claim(self, value)
        search.push(self.then, value)
        return True


@pytest.fixture
def node() -> fx.Node:
    return Build().input("x")


def search_of(core: Core, node: fx.Node) -> Search:
    return Search(core, node, Around())


def test_a_perverse_pattern_gives_up() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    layer = [b("add", x, y) for _ in range(32)]
    while len(layer) > 1:
        layer = [b("add", left, right) for left, right in zip(layer[::2], layer[1::2], strict=True)]
    program = b.done(*layer)
    names = (f"n{index}" for index in itertools.count())
    pattern: list[Operand] = [op("add")("x", "y").named(next(names)) for _ in range(31)]
    pattern.append(op("add")("x", v.relu))
    while len(pattern) > 1:
        pattern = [
            op("add")(left, right).named(next(names)) for left, right in zip(pattern[::2], pattern[1::2], strict=True)
        ]
    assert isinstance(pattern[0], Pattern)
    reason = refused(pattern[0], program, layer[0])
    assert "gave up after 20000 steps" in reason


def test_what_a_failed_alternative_bound_and_claimed_is_undone(node: fx.Node) -> None:
    search = search_of(First(Takes(1, Binds("a", Fails("no"))), Takes(2, Binds("b"))), node)
    assert search.run(lambda search: True)
    assert search.bindings == {"b": node}
    assert search.taken == {2: node}
    assert list(search.nodes) == [node]
    assert not search.choices


def test_a_fit_that_is_not_accepted_goes_on_with_the_next(node: fx.Node) -> None:
    seen: list[dict[str, Any]] = []

    def accept(search: Search) -> bool:
        seen.append(dict(search.bindings))
        return "b" in search.bindings

    search = search_of(First(Binds("a"), First(Binds("b"), Binds("c"))), node)
    assert search.run(accept)
    assert seen == [{"a": node}, {"b": node}]


def test_a_name_binds_one_value_and_the_blank_binds_none(node: fx.Node) -> None:
    search = search_of(Binds("a"), node)
    assert search.bind("a", 1)
    assert search.bind("a", 1.0)
    assert not search.bind("a", 2)
    assert str(search.why()) == "a is 1 already, so it cannot be 2 too"
    assert search.bind("_", 1)
    assert search.bind("_", 2)
    assert search.bindings == {"a": 1}


def test_the_failure_that_came_furthest_is_told(node: fx.Node) -> None:
    search = search_of(First(Takes(1, Fails("far")), Fails("near")), node)
    assert not search.run(lambda search: True)
    assert str(search.why()) == "far"
    assert search.reached == (node,)
    search = search_of(First(Fails("first"), Fails("second")), node)
    assert not search.run(lambda search: True)
    assert str(search.why()) == "first"


def test_a_node_that_may_not_be_taken_ranks_before_one_that_does_not_fit(node: fx.Node) -> None:
    search = search_of(Binds("a"), node)
    search.fail(node, lambda: Said("does not fit"))
    search.reject(node, lambda: Said("may not be taken"))
    search.fail(node, lambda: Said("does not fit either"))
    assert str(search.why()) == "may not be taken"
