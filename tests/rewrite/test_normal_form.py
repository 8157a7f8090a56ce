"""The normal form of a call: one way to write each, and the same numbers."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from quantc.ir.types import ScalarType
from quantc.rewrite.normal_form import is_item, normalize
from tests.support.by_hand import Builder, aten

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
W = torch.ones(4, 3, 3, 3)

CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "keywords by position": (
        aten.conv2d.default,
        (X, W),
        {"padding": [1, 1], "groups": 1},
        (None, [1, 1], [1, 1]),
        {},
    ),
    "defaults at the end": (aten.conv2d.default, (X, W, None, [1, 1], [0, 0], [1, 1], 1), {}, (), {}),
    "a tuple for a list": (aten.permute.default, (X, (0, 2, 3, 1)), {}, ([0, 2, 3, 1],), {}),
    "negative dims": (aten.transpose.int, (X, -1, -2), {}, (3, 2), {}),
    "a list of negative dims": (aten.mean.dim, (X, [-1, 2]), {}, ([3, 2],), {}),
    "a dim that is not there yet": (aten.unsqueeze.default, (X, -1), {}, (4,), {}),
    "a default dim, written otherwise": (aten.flatten.using_ints, (X, 1, 3), {}, (1,), {}),
    "an int for a float": (aten.dropout.default, (X, 1, False), {}, (1.0, False), {}),
    "ints that bound floats": (aten.clamp.default, (X, 0, 6), {}, (0.0, 6.0), {}),
    "no stride of a pool": (aten.max_pool2d.default, (X, [2, 2]), {}, ([2, 2], [2, 2]), {}),
    "an empty stride of a pool": (aten.avg_pool2d.default, (X, [3, 3], []), {}, ([3, 3], [3, 3]), {}),
    "keywords that say nothing": (
        aten.zeros_like.default,
        (X,),
        {"dtype": torch.float64, "pin_memory": False, "layout": torch.strided, "device": torch.device("cpu")},
        (),
        {"dtype": torch.float64},
    ),
}


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Node, Builder]:
    build, count = Builder(), iter(range(9))
    given = [build.input(f"x{next(count)}", arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    return build.call(target, *given, **kwargs), build


@pytest.mark.parametrize("name", CASES)
def test_a_call_has_one_form_with_the_same_numbers(name: str) -> None:
    target, args, kwargs, rest, named = CASES[name]
    node, build = call(target, args, kwargs)
    assert normalize(node)
    tensors = len(node.all_input_nodes)
    assert repr(list(node.args[tensors:])) == repr(list(rest)), "1 and 1.0 are not the same"
    assert node.kwargs == named
    given: tuple[Any, ...] = fx.map_arg(node.args, build.values.__getitem__)
    assert torch.equal(target(*given, **node.kwargs), target(*args, **kwargs))
    assert not normalize(node), "a normal form is its own"


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.clamp.default, (torch.tensor([1]), 0, 6)),
        (aten.conv2d.default, (X, W, None, [2, 2])),
        (aten.dropout.default, (X, 0.5, False)),
        (torch.relu, (X,)),
    ],
)
def test_what_is_normal_is_left_alone(target: Any, args: tuple[Any, ...]) -> None:
    node, _ = call(target, args, {})
    before = repr((node.args, node.kwargs))
    assert not normalize(node)
    assert repr((node.args, node.kwargs)) == before


def test_truth_values_are_not_the_number_one() -> None:
    node, _ = call(aten.add.Tensor, (X > 0, X > 1), {"alpha": True})
    normalize(node)
    assert node.kwargs == {"alpha": True}


def test_a_number_for_a_list_is_repeated() -> None:
    node, _ = call(aten.conv2d.default, (X, W), {})
    node.args = (*node.args, None, 2, 1)
    assert normalize(node)
    assert node.args[2:] == (None, [2, 2], [1, 1])


def test_a_symbolic_size_for_a_list_is_repeated_and_kept_where_defaults_are_dropped() -> None:
    node, build = call(aten.conv2d.default, (X, W), {})
    size = build.graph.placeholder("size")
    size.meta["val"] = ScalarType("int", "s0")
    node.args = (*node.args, None, size)
    assert normalize(node)
    assert node.args[3] == [size, size]
    assert not normalize(node)


def test_without_types_dims_stay_as_they_are() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.transpose.int, (graph.placeholder("x"), -1, 0))
    assert not normalize(node)


def test_outputs_are_known_by_their_index() -> None:
    node, build = call(aten.split.Tensor, (X, 1), {})
    item = build.graph.call_function(torch.ops.aten.alias.default, (node,))
    first = build.call(operator.getitem, node, 1)
    assert is_item(first, 1)
    assert not is_item(first, 0)
    assert not is_item(item, 0)
