"""Arrangements of inputs and outputs as text, which reads back without importing anything."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from quantc.errors import ParseError
from quantc.text.lexer import DEPTH, Reader
from quantc.text.pytree_text import is_name, keyword_names, read_spec, write_spec


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


torch.export.register_dataclass(Answer)


@pytest.mark.parametrize(
    "tree",
    [
        0,
        [],
        [(0,), {"a": 0, 3: [0], None: ()}],
        Pair(torch.ones(1), torch.ones(1)),
        Answer(torch.ones(1)),
        {"both": (Answer(torch.ones(1), torch.ones(1)), Pair(torch.ones(1), torch.ones(1)))},
        OrderedDict(b=0, a=[0]),
        deque([0, 0], maxlen=4),
        torch.return_types.max((torch.ones(1), torch.ones(1))),
        torch.Size([1, 2]),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_arrangements(tree: Any) -> None:
    spec = pytree.tree_structure(tree)
    text = write_spec(spec)
    copy = read_spec(Reader(text, text, 1))
    assert copy == spec
    leaves = [torch.full((1,), float(index)) for index in range(spec.num_leaves)]
    assert repr(pytree.tree_unflatten(leaves, copy)) == repr(pytree.tree_unflatten(leaves, spec))


def read(text: str) -> pytree.TreeSpec:
    reader = Reader(text, text, 1)
    spec = read_spec(reader)
    reader.end()
    return spec


def test_specs_are_written_as_the_literals_they_arrange() -> None:
    assert write_spec(pytree.tree_structure(((0, [0]), {"mask": 0}))) == '((*, [*]), {"mask": *})'
    assert write_spec(pytree.tree_structure((0,))) == "(*,)"
    assert write_spec(pytree.tree_structure(Pair(torch.ones(1), torch.ones(1)))) == f"{__name__}:Pair(*, *)"
    assert write_spec(pytree.tree_structure(OrderedDict(a=0))) == 'collections:OrderedDict[["a"]](*)'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1", "a bracket"),
        ("(*", "expected"),
        ('{"a": *, "a": *}', "given twice"),
        ("{(1,): *}", "not a key"),
        ("no_such_module:Class(*)", "no_such_module:Class"),
        ("collections:OrderedDict(*", "expected"),
        ('collections:OrderedDict[opaque("x")](*)', "text cannot carry"),
        (f"{__name__}:Pair(*)", "other fields"),
        (f"{__name__}:Pair.left(*)", "not known"),
        ("(" * (DEPTH + 2), "too deeply"),
    ],
)
def test_what_is_no_spec_is_refused(text: str, told: str) -> None:
    with pytest.raises(ParseError, match=told):
        read(text)


def test_keywords_are_those_of_the_second_of_a_pair() -> None:
    assert keyword_names(pytree.tree_structure(((0,), {"a": 0, "b": 0}))) == ["a", "b"]
    for other in (((0,), [0]), (0,), {"a": 0}):
        assert keyword_names(pytree.tree_structure(other)) == []


def test_names_are_identifiers_that_are_no_keywords() -> None:
    assert [is_name(name) for name in ("x", "x_1", "é", "class", "1x", "a b", "", None)] == [
        True,
        True,
        True,
        False,
        False,
        False,
        False,
        False,
    ]
