"""Which places share a scale: laws, against a union of sets made without graphs, and the errors."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.sharing import resolve_groups
from quantc.errors import AnnotationError
from quantc.ir.decisions import Fixed, Float, Quantize, SameAs, TensorOutcome
from quantc.ir.plan import Claim, Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.spec.spec import INT8, UINT8
from tests.support.small_backend import SMALL

SIZE = 5


class Ladder(nn.Module):
    """Each step reads the two before it, so that most tensors have two readers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(SIZE):
            x, y = y, x + y
        return y


@cache
def ladder() -> Program:
    return qc.capture(Ladder(), (torch.rand(2), torch.rand(2)))


ADDS = [f"add_{index}" if index else "add" for index in range(SIZE)]
SITES = [Site("", name, operand=operand) for name in ADDS for operand in (0, 1)]
SITES += [Site("", name, out=0) for name in ADDS]
ROOTS: list[TensorOutcome] = [Quantize(UINT8), Quantize(INT8), Fixed(0.5, 3, UINT8)]


@st.composite
def decisions(draw: st.DrawFn) -> dict[Site, TensorOutcome]:
    """Some places with outcomes of their own, others like one decided before them: never a circle."""
    chosen = draw(st.permutations(SITES))[: draw(st.integers(1, len(SITES)))]
    made: dict[Site, TensorOutcome] = {}
    for site in chosen:
        choices: list[TensorOutcome] = [*ROOTS, *map(SameAs, made)]
        made[site] = draw(st.sampled_from(choices))
    return made


def groups_of(outcomes: dict[Site, TensorOutcome]) -> tuple[Group, ...]:
    program = ladder().clone()
    program.plan.outcomes = outcomes
    return resolve_groups(program)


def root_of(site: Site, outcomes: dict[Site, TensorOutcome]) -> TensorOutcome:
    outcome = outcomes[site]
    return root_of(outcome.site, outcomes) if isinstance(outcome, SameAs) else outcome


def united(outcomes: dict[Site, TensorOutcome]) -> set[frozenset[Site]]:
    """The groups by brute force: sets that have something in common are merged until none have."""
    places = Places(ladder())
    sets: list[set[Site]] = [{site} for site in outcomes]
    for site, outcome in outcomes.items():
        if isinstance(outcome, SameAs):
            sets.append({site, outcome.site})
    for one, other in combinations(outcomes, 2):
        same_tensor = places.value(one) is places.value(other)
        if same_tensor and root_of(one, outcomes) == root_of(other, outcomes):
            sets.append({one, other})
    merged: list[set[Site]] = []
    for members in sets:
        apart = [group for group in merged if not group & members]
        merged = [*apart, members.union(*(group for group in merged if group & members))]
    return {frozenset(group) for group in merged}


@settings(max_examples=200)
@given(decisions())
def test_groups_are_the_connected_sets(outcomes: dict[Site, TensorOutcome]) -> None:
    found = groups_of(outcomes)
    assert {frozenset(group.places) for group in found} == united(outcomes)
    for group in found:
        assert {root_of(site, outcomes) for site in group.places} == {group.outcome}


@settings(max_examples=100)
@given(decisions(), st.randoms(use_true_random=False))
def test_the_order_of_annotation_does_not_matter(outcomes: dict[Site, TensorOutcome], random: object) -> None:
    items = list(outcomes.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert groups_of(dict(items)) == groups_of(outcomes)


@settings(max_examples=100)
@given(decisions())
def test_each_tensor_of_a_group_is_observed_once(outcomes: dict[Site, TensorOutcome]) -> None:
    places = Places(ladder())
    for group in groups_of(outcomes):
        assert len(set(group.values)) == len(group.values)
        assert {places.node(site) for site in group.values} == {places.value(site) for site in group.places}


@settings(max_examples=50)
@given(st.integers(2, len(SITES)), st.data())
def test_a_circle_is_an_error_that_names_its_members(length: int, data: st.DataObject) -> None:
    ring = data.draw(st.permutations(SITES))[:length]
    outcomes: dict[Site, TensorOutcome] = {
        site: SameAs(other) for site, other in zip(ring, [*ring[1:], ring[0]], strict=True)
    }
    with pytest.raises(AnnotationError, match="circle") as caught:
        groups_of(outcomes)
    assert all(str(site) in str(caught.value) for site in ring)


def test_a_place_like_a_float_one_is_an_error() -> None:
    outcomes: dict[Site, TensorOutcome] = {SITES[0]: SameAs(SITES[1]), SITES[1]: Float("asked for")}
    with pytest.raises(AnnotationError, match="is float") as caught:
        groups_of(outcomes)
    assert str(SITES[0]) in str(caught.value)
    assert str(SITES[1]) in str(caught.value)


def test_two_decisions_about_one_place_are_an_error() -> None:
    program = ladder().clone()
    annotator = Annotator(program)
    node = program.node("add")
    annotator.operand(node, 0, Quantize(UINT8))
    annotator.operand(node, 0, Quantize(UINT8))
    with pytest.raises(AnnotationError, match=r"two decisions about add:in0") as caught:
        annotator.operand(node, 0, Quantize(INT8))
    assert "add" in str(caught.value.where)
    assert caught.value.advice


def test_two_claims_on_one_node_are_an_error() -> None:
    program = ladder().clone()
    annotator = Annotator(program)
    annotator.claim([program.node("add")], Claim("mine", "add", "add"))
    with pytest.raises(AnnotationError, match="claimed twice"):
        annotator.claim([program.node("add")], Claim("theirs", "add", "add"))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 1)
        self.right = nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = torch.max_pool2d(self.left(x).relu(), 2)
        right = torch.sigmoid(torch.max_pool2d(self.right(x), 2))
        y: Tensor = self.last(torch.cat([left, right, left], 1)[:, :8])
        return y


def prepared() -> Program:
    torch.manual_seed(0)
    return qc.prepare(qc.capture(Joined().eval(), (torch.rand(1, 3, 4, 4),)), SMALL)


def by_place(program: Program) -> dict[str, Group]:
    return {str(place): group for group in program.plan.groups for place in group.places}


def test_what_is_joined_has_one_scale_and_fixed_tensors_keep_their_own() -> None:
    groups = by_place(prepared())
    assert groups["cat:in0"] is groups["cat:in1"] is groups["cat:in2"] is groups["cat:out0"]
    # the first pool hands on what comes from the convolution, so that is in it too
    assert groups["max_pool2d:out0"] is groups["cat:in0"]
    assert groups["max_pool2d:in0"] is groups["cat:in0"]
    sigmoid = groups["sigmoid:out0"]
    assert sigmoid is not groups["cat:in1"]
    assert sigmoid.source is Source.GIVEN


def test_a_tensor_that_is_wanted_on_another_scale_is_requantized() -> None:
    program = prepared()
    qc.calibrate(program, [torch.rand(1, 3, 4, 4)])
    quantized = qc.convert(program)
    sigmoid = quantized.node("sigmoid")
    chain = []
    node = sigmoid
    while not node.name.startswith("cat"):
        node = next(iter(node.users))
        chain.append(node)
    ops = [str(node.target).split(".")[1] for node in chain[:-1]]
    assert ops == ["quantize_per_tensor", "dequantize_per_tensor"] * 2
    assert chain[0].args[1] == 1 / 256
    assert chain[2].args[1] != 1 / 256


def test_what_is_joined_cannot_be_set_to_different_specs() -> None:
    torch.manual_seed(0)
    program = qc.capture(Joined().eval(), (torch.rand(1, 3, 4, 4),))
    config = qc.QuantConfig().set_edge("sigmoid", "cat", UINT8.but(qmax=127))
    with pytest.raises(AnnotationError, match=r"cat gives its inputs one scale") as caught:
        qc.prepare(program, SMALL, config=config)
    assert "cat:in0" in str(caught.value)
    assert "cat:in1" in str(caught.value)
