"""Where in a model a call is made: two turns of a loop are one place, two lines are two."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from quantc.flows.tracing.call_sites import Context, Key, OpSite, place_of_call, source_of_call


def here() -> Key:
    """The place that calls this."""
    return place_of_call(2)


def down(depth: int) -> Key:
    return here() if depth == 0 else down(depth - 1)


def test_turns_of_a_loop_are_one_place() -> None:
    places = {here() for _ in range(3)}
    assert len(places) == 1


def test_two_calls_are_two_places_even_on_one_line() -> None:
    first, second = here(), here()
    assert first != second
    assert len({here(), here()} | {first, second}) == 4


def test_a_function_called_from_two_places_is_at_two() -> None:
    first = down(0)
    second = down(0)
    assert first != second


def test_recursion_of_any_depth_is_one_place() -> None:
    assert len({down(depth) for depth in (1, 2, 5)}) == 1


def test_the_line_of_the_users_code_is_told() -> None:
    file, line = source_of_call(1)
    assert Path(file).name == "test_call_sites.py"
    assert Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip() == "file, line = source_of_call(1)"


def test_a_module_is_as_checked_until_an_attribute_is_another() -> None:
    site, module = OpSite(0, "linear", "model.py:1"), nn.Linear(2, 2)
    assert not site.is_as_checked(module)
    site.was_checked(module)
    assert site.is_as_checked(module)
    assert not site.is_as_checked(nn.Linear(2, 2))
    module.in_features = 3
    assert not site.is_as_checked(module)
    site.was_checked(module)
    assert site.is_as_checked(module)
    vars(module)["extra"] = 1
    assert not site.is_as_checked(module)


def test_a_copy_has_checked_nothing() -> None:
    site, module = OpSite(4, "linear", "model.py:1", "fc", is_product=True), nn.Linear(2, 2)
    site.was_checked(module)
    twin = copy.deepcopy(site)
    assert (twin.number, twin.name, twin.where, twin.leaf, twin.is_product) == (4, "linear", "model.py:1", "fc", True)
    assert not twin.is_as_checked(module)


def test_a_place_without_a_number_checks_nothing() -> None:
    site, module = OpSite(-1, "linear", "model.py:1"), nn.Linear(2, 2)
    site.was_checked(module)
    assert not site.is_as_checked(module)


def test_recursion_comes_back_to_the_context_around() -> None:
    root = Context("", -3)
    inner = Context("tree", -4, root)
    leaf = Context("tree.leaf", -5, inner)
    root.children["a",] = inner
    inner.children["b",] = leaf
    leaf.children["c",] = inner  # the leaf calls the tree again
    assert leaf.around("tree") is inner
    assert leaf.around("tree.leaf") is leaf
    assert leaf.around("elsewhere") is None
    assert {context.number for context in root.walk()} == {-3, -4, -5}
    assert len(root.walk()) == 3
