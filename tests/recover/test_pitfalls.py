"""The known ways in which recovering accuracy makes a model worse, as far as fitting meets them: a named test each.

R1 to R3 and R7 to R9 are of transforms, R13 of ranges, and R14 and R18 of formats: theirs name them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import QuantcError
from quantc.observe import Gram
from quantc.recover.fit_rounding import corrected
from quantc.recover.objective import damped, why_not
from quantc.spec.formats import DType, PerChannel, PerGroup
from quantc.spec.halves import Halves
from quantc.spec.spec import INT8_WEIGHT, INT32_BIAS
from tests.support.biased_backend import backend as biased
from tests.support.paths import TESTS
from tests.support.recovery import INT4_WEIGHT, Case, layer_of, linear_case, losses

ELSEWHERE = {
    "R4": "recover/test_random_layers.py::test_no_pass_ends_above_rounding_to_nearest",
    "R5": "recover/test_rounding.py::test_the_order_of_columns_is_undone",
    "R6": "recover/test_objective.py::test_why_there_is_no_objective",
    "R17": "recover/test_random_layers.py::test_parts_and_a_restart_give_the_same_bits",
}
"""Tests that hold more of a pitfall than those here."""


def ratio(case: Case, passes: str) -> float:
    """The loss after recovery, relative to that of rounding to nearest, on the half that judges."""
    prepared = case.prepared()
    better = qc.recover(prepared, passes, progress="silent")
    old, new = (losses(prepared, qc.convert(each), case.batches[1::2])[0] for each in (prepared, better))
    return float(new.sum() / old.sum())


def test_more_is_held_elsewhere() -> None:
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8"), place


def test_r4_dead_channels_and_too_few_rows() -> None:
    case = linear_case(inputs=48)
    for batch in case.batches:
        batch[:, ::5] = 0.0  # dead
        batch[4:] = batch[:1]  # four rows that differ, for 48 inputs
        batch[:, 1] *= 1e-20  # underflows when it is squared
    layer = layer_of(case.prepared())
    matrix, unit, share = damped(layer.objective.fit.products, 12)
    assert bool(torch.isfinite(matrix).all())
    assert bool(torch.isfinite(unit).all())
    assert share >= 0.1
    better = qc.recover(case.prepared(), progress="silent")
    reasons = [judgment.reason for entry in better.log for judgment in entry.judgments]
    assert any("added to the diagonal" in reason for reason in reasons)  # it says so
    assert ratio(case, "rescale,round,correct-bias") <= 1.00001


def test_r5_the_order_of_columns_and_groups() -> None:
    """Columns are set in the order of their energy, and each keeps the scale of its own group."""
    case = linear_case(INT4_WEIGHT.but(granularity=PerGroup(axis=1, size=8)), inputs=48)
    for batch in case.batches:
        batch *= torch.linspace(0.1, 3, 48)
    assert ratio(case, "round") < 0.7
    depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
    batches = [torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(seed)).abs() for seed in range(4)]
    assert ratio(Case("depthwise", depthwise, batches, linear_case().backend), "round") < 0.9


def test_r6_a_layer_that_no_batch_reached() -> None:
    assert why_not([Halves.empty(Gram, {})], (1, 4)) == "no batch reached it"
    half = Halves.empty(Gram, {})
    half.update(torch.ones(1, 3, 4), batch=0)
    assert why_not([half], (1, 4)) == "only one half of the batches reached it: there is nothing to judge on"


def test_r10_the_bias_takes_part() -> None:
    """Rounding that leaves the bias alone loses what the mean of the input makes of the error."""
    case = linear_case()
    for batch in case.batches:
        batch += 2.0
    free, kept = ratio(case, "round"), ratio(case, "round{bias=kept}")
    assert free < kept
    assert ratio(case, "correct-bias") < 0.5


def test_r12_bits_and_specs_are_those_of_the_plan() -> None:
    case = linear_case(INT8_WEIGHT.but(dtype=DType.INT3))
    prepared = case.prepared()
    better = qc.recover(prepared, progress="silent")
    assert better.plan.outcomes == prepared.plan.outcomes
    assert better.plan.groups == prepared.plan.groups
    plain, fitted = (qc.convert(each).root.state_dict() for each in (prepared, better))
    assert {name: (x.dtype, x.shape) for name, x in fitted.items()} == {
        name: (x.dtype, x.shape) for name, x in plain.items()
    }


def test_r15_groups_that_do_not_divide_the_channels() -> None:
    with pytest.raises(QuantcError, match="7"):
        qc.convert(linear_case(INT4_WEIGHT.but(granularity=PerGroup(axis=1, size=7))).prepared())


def test_r16_corrected_biases_are_whole_steps_of_the_accumulator() -> None:
    """Where a bias is an integer, half a step is no correction: what is judged is what will be stored."""
    case = linear_case(backend=biased(weight=INT4_WEIGHT.but(granularity=PerChannel(axis=0)), bias=INT32_BIAS))
    prepared = case.prepared()
    layer = layer_of(prepared)
    assert layer.bias_step is not None
    found = corrected(layer)
    assert not isinstance(found, str)
    assert found.shift is not None
    assert layer.bias is not None
    steps = (layer.bias.double() + found.shift.flatten()) / layer.bias_step.flatten()
    torch.testing.assert_close(steps, steps.round(), atol=1e-9, rtol=0)
    better = qc.recover(prepared, "correct-bias", progress="silent")
    (value,) = (x for site, x in better.plan.fitted.items() if site == layer.reads[0].bias)
    stored = [x for x in qc.convert(better).root.state_dict().values() if x.dtype == torch.int32]
    assert len(stored) == 1
    step = layer.bias_step.flatten()
    away = (stored[0].double() * step - value.double()).abs() / step
    is_kept = value != layer.bias
    assert int(is_kept.sum()) >= 3
    assert float(away[is_kept].max()) < 1e-3  # the others keep what they had
