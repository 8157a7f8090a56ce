"""Fake quantizers built from the groups of a plan: one a group, of the kind that its spec and source ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quantc as qc
from quantc.backends.x86 import X86
from quantc.errors import QuantcError, SpecError
from quantc.ir.decisions import Derived
from quantc.ir.plan import Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.qat.build import Builder
from quantc.qat.fake import (
    DerivedScale,
    FakeQuantizer,
    FollowedRange,
    GivenScale,
    LearnedScale,
    OwnRange,
    RunTimeScale,
)
from quantc.spec.formats import PerChannel, PerToken
from quantc.spec.spec import QuantSpec
from tests.support.training import small_program


def planned(act: QuantSpec = qc.UINT8, weight: QuantSpec = qc.INT8_NARROW_WEIGHT) -> Program:
    return qc.prepare(small_program(), replace(X86, roles={**X86.roles, "act": act, "weight": weight}, takes=()))


def group_of(program: Program, name: str) -> Group:
    return next(group for group in program.plan.groups if group.name == name)


def built(program: Program, name: str, builder: Builder | None = None) -> FakeQuantizer:
    group = group_of(program, name)
    return (builder or Builder(program)).build(group, Places(program).value(group.places[0]))


def test_weights_follow_their_own_range_and_activations_that_of_the_data() -> None:
    program = planned()
    weight, act = built(program, "linear:in1"), built(program, "conv2d:in0")
    assert isinstance(weight, OwnRange)
    assert isinstance(act, FollowedRange)
    assert (act.group, act.spec) == ("conv2d:in0", qc.UINT8)
    assert "conv2d" in act.where or "input" in act.where


def test_a_group_is_built_once() -> None:
    program = planned()
    builder = Builder(program)
    assert built(program, "conv2d:in0", builder) is built(program, "conv2d:in0", builder)
    assert built(program, "linear:in1", builder) is not built(program, "conv2d:in1", builder)
    assert sorted(builder.built) == ["conv2d:in0", "conv2d:in1", "linear:in1"]


@pytest.mark.parametrize(
    ("observe", "rate", "averaged"),
    [("minmax", None, {}), ("moving-average{rate=0.3}", 0.3, {}), ("mse", 0.01, {"mse": 1})],
)
def test_what_calibration_observes_becomes_a_range_that_follows(
    observe: str, rate: float | None, averaged: dict[str, int]
) -> None:
    program = planned(qc.UINT8.but(observe=observe))
    builder = Builder(program)
    found = built(program, "conv2d:in0", builder)
    assert isinstance(found, FollowedRange)
    assert found.rate == rate
    assert builder.averaged == averaged


def test_fixed_scales_are_given() -> None:
    found = built(planned(qc.UINT8.but(observe="fixed{scale=0.25 zero_point=3}")), "conv2d:in0")
    assert isinstance(found, GivenScale)
    assert found.trained().one == (0.25, 3)


def test_run_time_scales_have_none_before_they_run() -> None:
    program = qc.prepare(small_program(), "x86", config=qc.QuantConfig().set("4", qc.UINT8_DYNAMIC))
    assert isinstance(built(program, "linear:in0"), RunTimeScale)


def test_learned_scales_have_the_shape_of_their_granularity() -> None:
    program = qc.prepare(
        small_program(),
        "x86",
        config=qc.QuantConfig()
        .set_all(qc.UINT8.but(observe="lsq-plus"))
        .set_all(qc.INT8_NARROW_WEIGHT.but(observe="lsq")),
        qat=True,
    )
    act, weight = built(program, "conv2d:in0"), built(program, "linear:in1")
    assert isinstance(act, LearnedScale)
    assert isinstance(weight, LearnedScale)
    assert (act.scale.shape, weight.scale.shape) == ((), (3,))
    assert (act.zero_point.requires_grad, weight.zero_point.requires_grad) == (True, False)


def test_granularities_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(SpecError, match="per-token") as caught:
        built(planned(qc.UINT8.but(granularity=PerToken())), "conv2d:in0")
    assert caught.value.where
    with pytest.raises(SpecError, match="channels are not fixed"):
        built(planned(qc.UINT8.but(granularity=PerChannel(axis=0))), "conv2d:in0")  # the size of a batch


def test_derived_scales_have_the_product_of_their_parents() -> None:
    program = planned()
    linear = [group_of(program, name).places[0] for name in ("linear:in1", "conv2d:in1")]
    bias = replace(linear[0], operand=2)
    group = Group("linear:in2", Derived(tuple(linear)), (bias,), (bias,), Source.DERIVED)
    builder = Builder(program)
    value = Places(program).value(linear[0])
    with pytest.raises(QuantcError, match="comes after"):
        builder.build(group, value)
    parents = [built(program, name, builder) for name in ("linear:in1", "conv2d:in1")]
    found = builder.build(group, value)
    assert isinstance(found, DerivedScale)
    assert found.spec.granularity == PerChannel(axis=0)  # for the parents have a scale a channel
    for parent in parents:
        parent(torch.ones(2, 3))
    assert torch.allclose(found.find(torch.empty(0)).scale, torch.full((2,), (1 / 127) ** 2))
