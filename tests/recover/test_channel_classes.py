"""Equivalence classes of channels."""

from __future__ import annotations

import networkx as nx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quantc.recover.channel_classes import Classes, components

PAIRS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=20)


@given(PAIRS)
def test_components_are_those_of_a_graph(pairs: list[tuple[int, int]]) -> None:
    found = components(12, np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(12))
    graph.add_edges_from(pairs)
    for part in nx.connected_components(graph):
        assert set(found[list(part)]) == {min(part)}


def test_labels_of_two_axes_leave_one_class() -> None:
    """What is the same along an axis, and of each element along it, is one class."""
    classes = Classes()
    rows, columns = classes.fresh((1, 3)), classes.fresh((4, 1))
    classes.unite(rows, columns)
    solved = classes.solved()
    assert len(set(solved.root[:7])) == 1
    assert len(set(solved.group)) == 1


def test_tied_along_an_axis() -> None:
    classes = Classes()
    labels = classes.fresh((2, 3))
    tied = classes.tied(labels, [1])
    assert tied.shape == (2, 1)
    root = classes.solved().root.reshape(2, 3)
    assert (root == root[:, :1]).all()
    assert root[0, 0] != root[1, 0]


def test_a_fixed_channel_fixes_its_class_and_says_why() -> None:
    classes = Classes()
    one, other, free = classes.fresh((2,)), classes.fresh((2,)), classes.fresh((2,))
    classes.fix(other[:1], "first")
    classes.unite(one, other)
    solved = classes.solved()
    assert solved.reasons == {int(one[0]): "first"}
    assert classes.is_fixed(other[:1])
    assert not classes.is_fixed(other)
    assert not classes.is_fixed(free)
