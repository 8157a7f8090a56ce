"""The driver: a proposal is kept, output by output, where the other half says so; else nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quantc as qc
from quantc.ir.program import Program
from quantc.observe.trained import Trained
from quantc.passes.round import Round
from quantc.pipeline.pipeline import Pipeline
from quantc.recover.fitting import Proposal, fit, mixed, scale_sets
from quantc.recover.layers import Layer
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor
from quantc.spec.numerics import QParams
from quantc.spec.spec import INT8_WEIGHT
from tests.support.recovery import layer_of, linear_case

PASSES = ("rescale", "round", "round{method=coordinate}", "correct-bias", "rescale,round,correct-bias")
INT4 = INT8_WEIGHT.but(dtype=DType.INT4)


def worse(layer: Layer) -> Proposal:
    return Proposal(torch.zeros_like(layer.weight), layer.qparams, None)


def exact_in_part(layer: Layer) -> Proposal:
    """Better for the first two outputs, and worse for the others."""
    weight = torch.zeros_like(layer.weight)
    weight[:2] = layer.weight[:2]
    return Proposal(weight, layer.qparams, None, "by hand")


def test_what_is_worse_is_undone() -> None:
    program = linear_case().prepared()
    before = program.dump("text")
    (judgment,) = fit(program, worse)
    assert judgment.fate == "undone"
    assert judgment.reason == "no better on the batches that it was not fitted to"
    assert judgment.before is not None
    assert judgment.after is not None
    assert judgment.after > judgment.before
    assert program.plan.fitted == {}
    assert program.dump("text") == before


def test_what_is_better_for_some_outputs_is_kept_for_those() -> None:
    program = linear_case().prepared()
    layer = layer_of(program)
    (judgment,) = fit(program, exact_in_part)
    assert judgment.fate == "kept"
    assert judgment.reason == "2 of 6 outputs, by hand"
    (kept,) = program.plan.fitted.values()
    assert torch.equal(kept[:2], layer.weight[:2])
    assert torch.equal(kept[2:], layer.current[2:])


def test_what_is_not_proposed_is_refused() -> None:
    (judgment,) = fit(linear_case().prepared(), lambda layer: "no time")
    assert (judgment.fate, judgment.reason) == ("refused", "no time")


def test_outputs_that_share_a_scale_are_taken_all_or_none() -> None:
    program = linear_case(INT4.but(granularity=PerTensor())).prepared()
    scale = replace(layer_of(program).qparams, scale=layer_of(program).qparams.scale * 2)
    (judgment,) = fit(program, lambda layer: replace(exact_in_part(layer), qparams=scale))
    assert judgment.fate == "undone"


@pytest.mark.parametrize(
    ("share", "count"),
    [(PerTensor(), 1), (PerChannel(axis=0), 6), (PerChannel(axis=1), 1), (PerGroup(axis=1, size=8), 6)],
)
def test_no_two_sets_of_outputs_share_a_scale(share: PerTensor | PerChannel | PerGroup, count: int) -> None:
    layer = layer_of(linear_case(INT4.but(granularity=share)).prepared())
    assert len(set(scale_sets(layer).flatten().tolist())) == count


def test_a_mixture_has_the_scales_of_what_it_took() -> None:
    layer = layer_of(linear_case().prepared())
    one = Proposal(layer.current, layer.qparams, None)
    doubled = QParams(layer.qparams.scale * 2, layer.qparams.zero_point)
    other = Proposal(layer.weight, doubled, torch.ones(1, 6, dtype=torch.float64))
    mask = torch.tensor([[True, False, True, False, False, False]])
    found = mixed(layer, one, other, mask)
    assert torch.equal(found.weight, torch.where(mask[0, :, None], layer.weight, layer.current))
    assert torch.equal(found.qparams.scale, torch.where(mask[0], doubled.scale, layer.qparams.scale))
    assert found.shift is not None
    assert torch.equal(found.shift, mask.double())
    assert mixed(layer, one, other, torch.ones_like(mask)) is other


@pytest.mark.parametrize("text", PASSES)
def test_a_pass_run_again_does_nothing(text: str) -> None:
    better = qc.recover(linear_case().prepared(), text, progress="silent")
    fitted = {site: tensor.clone() for site, tensor in better.plan.fitted.items()}
    assert fitted
    last = Pipeline((*Pipeline.parse(text),)[-1:])
    again = last.run(better.draft())
    assert not again.log[-1].changed
    assert again.log[-1].notes == ("it has run, and nothing has changed since",)
    assert {site: tensor.tolist() for site, tensor in again.plan.fitted.items()} == {
        site: tensor.tolist() for site, tensor in fitted.items()
    }


def test_after_more_data_it_runs_again() -> None:
    case = linear_case()
    better = qc.recover(case.prepared(), "round", progress="silent")
    qc.calibrate(better, [batch + 1 for batch in case.batches], collect="recover", progress="silent")
    assert Round().run(better).judgments


def test_the_plan_has_the_scales_that_weights_were_rounded_to() -> None:
    program: Program = qc.recover(linear_case().prepared(), "rescale", progress="silent")
    layer = layer_of(program)
    found = program.plan.statistics[layer.group.name]
    assert isinstance(found, Trained)
    assert torch.equal(layer.weight_at(layer.levels(layer.current, layer.qparams), layer.qparams), layer.current)
