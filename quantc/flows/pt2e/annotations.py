"""Annotations in `node.meta`, parsed once into a typed table.

Specs are recognized by their fields and not by their class, so those of torchao, of ExecuTorch and our own all parse, and
none of these packages is imported. Nothing of the flow reads decisions from `meta` after this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from quantc.errors import AnnotationError
from quantc.flows.pt2e.quantizer import Q_ANNOTATION_KEY, EdgeOrNode
from quantc.support.equivalence import equivalence_classes, follow

ALIKE = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")
"""Two uses of one tensor share an observer if their specs have the same of these."""


@dataclass(frozen=True, eq=False)
class Observed:
    """An observer made as a spec says."""

    spec: Any

    @property
    def signature(self) -> tuple[Any, ...]:
        return tuple(getattr(self.spec, name, "none") for name in ALIKE)


@dataclass(frozen=True, eq=False)
class Fixed(Observed):
    """A scale and zero point that the spec gives."""


@dataclass(frozen=True, eq=False)
class Derived(Observed):
    """Qparams that a function of the spec derives from other places."""

    places: tuple[EdgeOrNode, ...] = ()

    @property
    def signature(self) -> tuple[Any, ...]:
        # a bias read twice may belong to two products: it is one tensor, and has two scales
        return (*super().signature, self.places, self.spec.derive_qparams_fn)


@dataclass(frozen=True, slots=True)
class Same:
    """Like another place."""

    place: EdgeOrNode


Wanted = Observed | Same


@dataclass
class Annotations:
    """The requests of a graph's annotations by site, in graph order, operands before results."""

    wanted: dict[EdgeOrNode, Wanted] = field(default_factory=dict)
    apart: set[fx.Node] = field(default_factory=set)
    """The nodes whose operands share nothing with other uses of the same tensor, unless a spec says so."""
    nodes: set[fx.Node] = field(default_factory=set)
    """Every node with an annotation that says something."""

    def groups(self) -> list[Group]:
        """The places that share one observer: connected by being like each other, or by being uses of one tensor
        that ask for the same. The order of annotation does not matter."""
        roots = {place: self._root(place, *end) for place, end in follow(self.wanted, _target, show).items()}
        ties = [(place, wanted.place) for place, wanted in self.wanted.items() if isinstance(wanted, Same)]
        ties += self._ties_of_tensors(roots)
        order = {place: number for number, place in enumerate(self.wanted)}
        sets = [sorted(members, key=order.__getitem__) for members in equivalence_classes(self.wanted, ties)]
        sets.sort(key=lambda members: order[members[0]])
        return [_group(members, self.wanted) for members in sets]

    def moved(self, places: Mapping[EdgeOrNode, EdgeOrNode]) -> Annotations:
        """The same for a graph that was rewritten: what was said of a place is said of where it lies now."""
        if not places:
            return self
        wanted = {places.get(place, place): _rename_places(found, places) for place, found in self.wanted.items()}
        return Annotations(wanted, self.apart, self.nodes)

    def _ties_of_tensors(self, roots: dict[EdgeOrNode, Observed]) -> Iterable[tuple[EdgeOrNode, EdgeOrNode]]:
        """Uses of one tensor that ask for the same, where one of its readers is willing to share."""
        alike: dict[tuple[Any, ...], list[EdgeOrNode]] = {}
        for place, root in roots.items():
            tensor = place[0] if isinstance(place, tuple) else place
            alike.setdefault((tensor, root.signature), []).append(place)
        for first, *rest in alike.values():
            if any(isinstance(place, tuple) and place[1] not in self.apart for place in (first, *rest)):
                yield from ((first, place) for place in rest)

    def _root(self, place: EdgeOrNode, end: EdgeOrNode, found: Wanted | None) -> Observed:
        if isinstance(found, Observed):
            return found
        raise AnnotationError(
            f"{show(place)} is to be quantized like {show(end)}, which is not annotated",
            where=f"{show(place)}, {show(end)}",
            advice="annotate that place too, or give this one a spec of its own",
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Places that share one observer, and what it is made from."""

    places: tuple[EdgeOrNode, ...]
    root: Observed


def _group(members: list[EdgeOrNode], wanted: dict[EdgeOrNode, Wanted]) -> Group:
    root = next(found for member in members if isinstance(found := wanted[member], Observed))
    return Group(tuple(members), root)


def _rename_places(wanted: Wanted, places: Mapping[EdgeOrNode, EdgeOrNode]) -> Wanted:
    if isinstance(wanted, Same):
        return Same(places.get(wanted.place, wanted.place))
    if isinstance(wanted, Derived):
        return Derived(wanted.spec, tuple(places.get(place, place) for place in wanted.places))
    return wanted


def _target(wanted: Wanted) -> EdgeOrNode | None:
    return wanted.place if isinstance(wanted, Same) else None


def show(place: EdgeOrNode) -> str:
    """A place, for messages."""
    return f"{place[0].name} -> {place[1].name}" if isinstance(place, tuple) else f"{place.name}:out"


def read_annotations(graph: fx.Graph) -> Annotations:
    """The annotations of a graph."""
    found = Annotations()
    for node in graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is None:
            continue
        for producer, spec in (annotation.input_qspec_map or {}).items():
            if spec is not None:
                found.wanted[_edge(producer, node)] = wanted_by(spec, (producer, node))
        if annotation.output_qspec is not None:
            found.wanted[node] = wanted_by(annotation.output_qspec, node)
        if not getattr(annotation, "allow_implicit_sharing", True):
            found.apart.add(node)
        if annotation.input_qspec_map or annotation.output_qspec is not None:
            found.nodes.add(node)
    return found


def _edge(producer: fx.Node, node: fx.Node) -> EdgeOrNode:
    if producer in node.all_input_nodes:
        return producer, node
    raise AnnotationError(
        f"{node.name} is annotated to read {producer}, which it does not",
        where=f"{node.format_node()}",
        advice=f"annotate what it reads: {', '.join(each.name for each in node.all_input_nodes)}",
    )


def wanted_by(spec: Any, place: EdgeOrNode) -> Wanted:
    """Parse a spec by its fields."""
    if hasattr(spec, "edge_or_node"):
        return Same(spec.edge_or_node)
    if hasattr(spec, "derive_qparams_fn"):
        return Derived(spec, tuple(spec.derived_from))
    if hasattr(spec, "observer_or_fake_quant_ctr"):
        return Observed(spec)
    if hasattr(spec, "scale") and hasattr(spec, "zero_point"):
        return Fixed(spec)
    raise AnnotationError(
        f"{spec!r} is no spec: it has no observer_or_fake_quant_ctr, edge_or_node, derive_qparams_fn, or scale",
        where=show(place),
        advice="annotate with QuantizationSpec, SharedQuantizationSpec, DerivedQuantizationSpec or "
        "FixedQParamsQuantizationSpec",
    )
