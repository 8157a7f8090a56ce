"""The message of a failed pass, and the node it was at, found in the traceback."""

from __future__ import annotations

import pytest
from torch import fx

from quantc.errors import QuantcError, VerifyError
from quantc.pipeline.failure import FAULTS, failure_text, node_at_fault


def nodes(*names: str) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(name) for name in names]


def fails(error: Exception, *given: fx.Node) -> None:
    """Raise an error below one frame for each node, the last of them innermost."""
    if not given:
        raise error
    node, *rest = given
    assert node.op == "placeholder"
    fails(error, *rest)


def raised(error: Exception, *given: fx.Node) -> Exception:
    with pytest.raises(type(error)) as caught:
        fails(error, *given)
    return caught.value


def test_errors_of_others_are_told_as_they_are() -> None:
    assert failure_text(ValueError("no such axis")) == "no such axis"
    assert failure_text(KeyError("w")) == "'w'"


def test_our_errors_are_told_with_their_place_and_without_advice() -> None:
    assert failure_text(QuantcError("it broke", where="node relu", advice="mend it")) == "it broke\n    at node relu"
    assert failure_text(QuantcError("it broke")) == "it broke"


@pytest.mark.parametrize("more", [-1, 0, 1, 7])
def test_only_the_first_faults_are_told_and_the_others_counted(more: int) -> None:
    faults = [f"fault {number}" for number in range(FAULTS + more)]
    lines = failure_text(VerifyError("the graph is not sound", faults, where="Net")).splitlines()
    assert lines[:2] == ["the graph is not sound", "    at Net"]
    assert lines[2 : 2 + FAULTS] == [f"    - {fault}" for fault in faults[:FAULTS]]
    assert lines[2 + FAULTS :] == ([f"    - and {more} more"] if more > 0 else [])


def test_the_innermost_node_is_at_fault() -> None:
    outer, inner = nodes("outer", "inner")
    assert node_at_fault(raised(IndexError("7"), outer, inner)) is inner
    assert node_at_fault(raised(IndexError("7"), outer)) is outer


def test_variables_of_that_name_that_hold_something_else_are_passed_over() -> None:
    (outer,) = nodes("outer")

    def look(node: str) -> None:
        fails(IndexError(node))

    def walk(node: fx.Node) -> None:
        look(node.name)

    with pytest.raises(IndexError) as caught:
        walk(outer)
    assert node_at_fault(caught.value) is outer


def test_without_a_node_nobody_is_at_fault() -> None:
    assert node_at_fault(raised(ValueError("no node here"))) is None
    assert node_at_fault(ValueError("never raised")) is None
