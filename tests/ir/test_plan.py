"""The plan of a quantization: decisions beside the graph, which follow it into copies."""

from __future__ import annotations

import torch
from torch import fx

from quantc.ir.decisions import FLOAT, Derived, Fixed, Quantize
from quantc.ir.plan import Claim, Group, Part, Plan, Source, spec_of
from quantc.ir.sites import Site
from quantc.spec.formats import PerChannel, PerTensor, Timing
from quantc.spec.numerics import QParams
from quantc.spec.spec import INT8, INT32_BIAS, UINT8

OUT = Site("", "linear", out=0)
BIAS = Derived((Site("", "linear", operand=0), Site("", "linear", operand=1)))


def group(outcome: Quantize | Fixed | Derived) -> Group:
    return Group(str(OUT), outcome, (OUT,), (OUT, Site("", "relu", operand=0)))


def filled() -> tuple[Plan, fx.Node, fx.Node]:
    graph = fx.Graph()
    linear, relu = graph.placeholder("linear"), graph.placeholder("relu")
    plan = Plan(outcomes={OUT: Quantize(INT8)}, groups=(group(Quantize(INT8)),), batches=3)
    plan.claims[linear] = Claim("x86", "linear", "linear")
    plan.left_float[relu] = "a mask"
    return plan, linear, relu


def test_a_plan_reads_line_by_line() -> None:
    plan, linear, _ = filled()
    plan.claims[linear] = Claim("x86", "linear", "linear", Part.PROPAGATED, Timing.DYNAMIC)
    assert str(plan).splitlines() == [
        "claim linear: propagated by linear of x86 (dynamic)",
        "float relu: a mask",
        "place linear:out0: quantize as INT8",
        "group linear:out0: quantize as INT8, linear:out0, relu:in0",
    ]
    assert str(Claim("x86", "linear", "linear")) == "quantized by linear of x86"


def test_a_plan_that_leaves_everything_float_says_something() -> None:
    graph = fx.Graph()
    assert Plan().is_empty
    assert Plan().says_nothing
    plan = Plan()
    plan.left_float[graph.placeholder("x")] = "asked for"
    assert plan.is_empty
    assert not plan.says_nothing
    assert not Plan(outcomes={OUT: FLOAT}).says_nothing


def test_plans_decide_alike_if_claims_reasons_and_outcomes_are_equal() -> None:
    plan, linear, relu = filled()
    same = plan.renamed({linear: linear, relu: relu})
    assert plan.decides_like(same)
    same.batches = 9
    assert plan.decides_like(same), "statistics are no decisions"
    for change in ("claims", "left_float", "outcomes"):
        other = plan.renamed({linear: linear, relu: relu})
        if change == "outcomes":
            other.outcomes[OUT] = FLOAT
        else:
            getattr(other, change).rows.clear()
        assert not plan.decides_like(other), change


def test_a_copy_of_the_graph_has_a_plan_of_its_own() -> None:
    plan, linear, relu = filled()
    plan.lowered[linear] = "linear"
    plan.made_for[relu] = "linear"
    plan.instruction_sets["x86"] = "vnni"
    graph = fx.Graph()
    new = {linear: graph.placeholder("linear"), relu: graph.placeholder("relu")}
    copy = plan.renamed(new)
    assert [list(table) for table in copy.tables] == [[new[linear]], [new[relu]], [new[linear]], [new[relu]]]
    assert (copy.groups, copy.batches, copy.instruction_sets) == (plan.groups, 3, {"x86": "vnni"})
    copy.outcomes.clear()
    copy.instruction_sets.clear()
    copy.claims.drop(new[linear])
    assert (len(plan.outcomes), len(plan.instruction_sets), len(plan.claims)) == (1, 1, 1)


def test_a_derived_group_is_per_channel_if_its_scales_are() -> None:
    one = QParams(torch.tensor(0.5), torch.tensor(0))
    many = QParams(torch.tensor([0.5, 0.25]), torch.tensor([0, 0]))
    assert spec_of(group(BIAS)) == spec_of(group(BIAS), one) == INT32_BIAS
    assert spec_of(group(BIAS)).granularity == PerTensor()
    assert spec_of(group(BIAS), many).granularity == PerChannel(axis=0)
    assert spec_of(group(Quantize(INT8)), many) == INT8
    assert spec_of(group(Fixed(0.5, 0, UINT8))) == UINT8


def test_groups_take_their_range_from_data_unless_told() -> None:
    assert group(Quantize(INT8)).source is Source.DATA
