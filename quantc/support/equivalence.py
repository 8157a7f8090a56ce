"""Equivalence classes over any hashable keys: reference chasing, and connected components."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import networkx as nx

from quantc.errors import AnnotationError

P = TypeVar("P", bound=Hashable)
O = TypeVar("O")  # noqa: E741 - an outcome


def follow(
    outcomes: Mapping[P, O], like: Callable[[O], P | None], show: Callable[[P], str] = str
) -> dict[P, tuple[P, O | None]]:
    """For each key, the key at the end of its chain of references and the outcome there; None if it has no outcome.

    `like` gives the key that an outcome refers to, and None for an outcome that stands for itself. Raise
    AnnotationError on a cycle.
    """
    known: dict[P, tuple[P, O | None]] = {}
    for start in outcomes:
        path: dict[P, None] = {}
        place = start
        while place not in known:
            if place in path:
                raise _circle([show(member) for member in path], show(place))
            path[place] = None
            outcome = outcomes.get(place)
            target = like(outcome) if outcome is not None else None
            if target is None:
                known[place] = (place, outcome)
                break
            place = target
        known.update(dict.fromkeys(path, known[place]))
    return known


def equivalence_classes(places: Iterable[P], ties: Iterable[tuple[P, P]]) -> Iterator[set[P]]:
    """The equivalence classes that `ties` induce on `places`: connected components, independent of the order of the
    ties."""
    graph: nx.Graph[P] = nx.Graph()
    graph.add_nodes_from(places)
    graph.add_edges_from(ties)
    yield from nx.connected_components(graph)


def _circle(path: list[str], place: str) -> AnnotationError:
    members = path[path.index(place) :]
    return AnnotationError(
        f"places are like each other in a circle: {' -> '.join([*members, place])}",
        where=", ".join(members),
        advice="give one of them a spec of its own",
    )
