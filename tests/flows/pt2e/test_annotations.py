"""Annotations as somebody left them in the metadata of nodes, read once into groups that share an observer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from quantc.errors import AnnotationError
from quantc.flows.pt2e import (
    QuantizationAnnotation,
    Quantizer,
    SharedQuantizationSpec,
    prepare_pt2e,
)
from quantc.flows.pt2e.annotations import Annotations, Observed, Same, read_annotations
from quantc.flows.pt2e.quantizer import EdgeOrNode
from tests.support.custom_quantizer import ACT, CustomQuantizer, Network
from tests.support.pt2e_small import Sum, captured

aten = torch.ops.aten


class Ladder(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            x, y = y, x + y
        return y


LADDER = torch.export.export(Ladder(), (torch.rand(2), torch.rand(2))).module().graph

ADDS = [node for node in LADDER.nodes if node.target is aten.add.Tensor]

PLACES: list[EdgeOrNode] = [
    place for node in ADDS for place in (*((each, node) for each in node.all_input_nodes), node)
]


@st.composite
def wanted(draw: st.DrawFn) -> dict[EdgeOrNode, Any]:
    """Some places with a spec of their own, others like one of these: never a circle."""
    chosen = draw(st.permutations(PLACES))[: draw(st.integers(1, len(PLACES)))]
    made: dict[EdgeOrNode, Any] = {}
    for place in chosen:
        is_like = bool(made) and draw(st.booleans())
        made[place] = Same(draw(st.sampled_from(list(made)))) if is_like else Observed(ACT)
    return made


@settings(max_examples=100)
@given(wanted(), st.randoms(use_true_random=False), st.sets(st.sampled_from(ADDS)))
def test_groups_do_not_depend_on_the_order_of_annotation(
    made: dict[Any, Any], random: Any, apart: set[fx.Node]
) -> None:
    shuffled = list(made.items())
    random.shuffle(shuffled)
    sets = [
        {frozenset(group.places) for group in Annotations(dict(each), apart).groups()}
        for each in (made.items(), shuffled)
    ]
    assert sets[0] == sets[1]
    assert sum(len(each) for each in sets[0]) == len(made)


@settings(max_examples=100)
@given(wanted(), st.sets(st.sampled_from(ADDS)))
def test_groups_are_what_is_tied(made: dict[Any, Any], apart: set[fx.Node]) -> None:
    """Against pairs looked at one by one, merged until nothing changes."""

    def tensor(place: EdgeOrNode) -> fx.Node:
        return place[0] if isinstance(place, tuple) else place

    def is_willing(place: Any) -> bool:
        return isinstance(place, tuple) and place[1] not in apart

    sets = [{place} for place in made]
    for place, found in made.items():
        if isinstance(found, Same):
            sets.append({place, found.place})
        same = [other for other in made if tensor(other) is tensor(place) and (is_willing(other) or is_willing(place))]
        sets += [{place, other} for other in same]
    merged: list[set[Any]] = []
    for each in sets:
        hit = [other for other in merged if other & each]
        merged = [other for other in merged if not other & each] + [each.union(*hit)]
    assert {frozenset(group.places) for group in Annotations(made, apart).groups()} == set(map(frozenset, merged))


class Faulty(Quantizer):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        (node,) = model.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        x, y = node.all_input_nodes
        faults: dict[str, QuantizationAnnotation] = {
            "circle": QuantizationAnnotation(
                {x: SharedQuantizationSpec((y, node)), y: SharedQuantizationSpec((x, node))}
            ),
            "not annotated": QuantizationAnnotation({x: SharedQuantizationSpec(y)}),
            "does not": QuantizationAnnotation({node: ACT}),
            "no spec": QuantizationAnnotation({x: "int8"}),  # type: ignore[dict-item]
        }
        node.meta["quantization_annotation"] = faults[self.fault]
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """It knows no better."""


@pytest.mark.parametrize("fault", ["circle", "not annotated", "does not", "no spec"])
def test_faulty_annotations_are_named(fault: str) -> None:
    with pytest.raises(AnnotationError, match=fault) as caught:
        prepare_pt2e(captured(Sum(), torch.rand(2), torch.rand(2)), Faulty(fault))
    assert caught.value.where
    assert caught.value.advice


def test_specs_are_known_by_their_fields() -> None:
    """And so those of other packages are read too."""
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    exported = captured(model, x)
    quantizer = CustomQuantizer()
    quantizer.annotate(exported)
    found = read_annotations(exported.graph)
    kinds = [type(wanted).__name__ for wanted in found.wanted.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Observed": 14, "Derived": 3, "Same": 1, "Fixed": 1}


def test_an_operand_without_a_spec_is_left_alone() -> None:
    module = captured(Sum(), torch.ones(2), torch.ones(2))
    (add,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    x, y = add.all_input_nodes
    add.meta["quantization_annotation"] = QuantizationAnnotation({x: ACT, y: None})
    found = read_annotations(module.graph)
    assert list(found.wanted) == [(x, add)]
    assert found.nodes == {add}
