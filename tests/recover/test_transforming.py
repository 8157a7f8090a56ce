"""Transforms: what is carried is what would be seen, what changes numbers is undone, and nothing is silent."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import fx, nn

import quantc as qc
from quantc.errors import CalibrationError
from quantc.ir import homogeneity
from quantc.observe.extremes import Extremes
from quantc.observe.gram import Gram
from quantc.recover import channel_rules
from tests.support.spread_nets import collected, decibels, images, mobile

DATA = images(1)


def test_what_is_carried_is_what_is_seen_again() -> None:
    """Powers of two move no digit: ranges of channels and of tensors have the bits of a new calibration, and Grams all that
    they keep."""
    better = qc.recover(collected(mobile(), DATA), "equalize", batches=DATA, progress="silent")
    fresh = better.clone()
    fresh.plan.statistics, fresh.plan.collected, fresh.plan.batches = {}, {}, 0
    qc.calibrate(fresh, DATA, collect="recover", progress="silent")
    assert better.plan.collected.keys() == fresh.plan.collected.keys()
    for name, halves in better.plan.collected.items():
        other = fresh.plan.collected[name]
        for one, two in ((halves.even, other.even), (halves.odd, other.odd)):
            if isinstance(one, Gram):
                again = cast(Gram, two)
                assert relative(one, again) < 2.0**-23
                torch.testing.assert_close(one.mean(), again.mean(), rtol=1e-7, atol=0)
            else:
                states = [each.to_state() for each in (one, two)]
                assert all(torch.equal(x, states[1].tensors[key]) for key, x in states[0].tensors.items()), name
    for name, observation in better.plan.statistics.items():
        mine, theirs = observation.to_state(), fresh.plan.statistics[name].to_state()
        assert mine.values == theirs.values
        assert all(torch.equal(x, theirs.tensors[key]) for key, x in mine.tensors.items()), name


def relative(one: Gram, other: Gram) -> float:
    """The largest difference of two Grams, relative to the energies of both channels."""
    energy = other.matrix().diagonal(dim1=1, dim2=2).sqrt() + 1e-300
    return float(((one.matrix() - other.matrix()).abs() / energy.unsqueeze(1) / energy.unsqueeze(2)).max())


def test_the_law_holds_for_any_factors() -> None:
    """Up to the rounding of rows to 15 bits, which is another for other numbers."""
    better = qc.recover(collected(mobile(), DATA), "equalize{factors=any}", batches=DATA, progress="silent")
    fresh = better.clone()
    fresh.plan.collected, fresh.plan.batches = {}, 0
    qc.calibrate(fresh, DATA, collect="recover", progress="silent")
    for name, halves in better.plan.collected.items():
        one, two = halves.even, fresh.plan.collected[name].even
        if isinstance(one, Gram):
            assert relative(one, cast(Gram, two)) < 2.0**-12
        else:
            high = cast(Extremes, one).high, cast(Extremes, two).high
            torch.testing.assert_close(*high, rtol=1e-4, atol=1e-6)


def test_without_batches_ranges_stay_and_the_log_says_which() -> None:
    prepared = collected(mobile(), DATA)
    same = qc.recover(prepared, "equalize", progress="silent")
    assert not same.log[-1].changed
    assert "must be seen again" in str(same.recovery())
    with pytest.raises(CalibrationError, match="once only"):
        qc.recover(prepared, "equalize", batches=iter(DATA), progress="silent")
    with pytest.raises(CalibrationError, match="no batches to observe"):
        qc.recover(prepared, "equalize", batches=[], progress="silent")


def test_what_changes_the_outputs_is_undone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that is held to be proportional and is not: the outputs tell."""
    prepared = collected(mobile(nn.Softplus), DATA)
    true = homogeneity.scaling_operands

    def liar(node: fx.Node) -> tuple[tuple[str, ...], ...]:
        return (("x",),) if "softplus" in node.name else true(node)

    monkeypatch.setattr(channel_rules, "scaling_operands", liar)
    better = qc.recover(prepared, "equalize", batches=DATA, progress="silent")
    undone = [each for each in better.log[-1].judgments if "an output differs" in each.reason]
    assert undone
    assert all(each.fate == "undone" for each in undone)
    torch.testing.assert_close(better(DATA[0]), prepared(DATA[0]), rtol=1e-4, atol=1e-6)


def test_fitted_weights_are_left_alone() -> None:
    fitted = qc.recover(collected(mobile(), DATA), "round", progress="silent")
    same = qc.recover(fitted, "equalize", batches=DATA, progress="silent")
    assert "transform before fitting" in str(same.log[-1])
    assert not same.log[-1].changed


def test_one_call_sees_batches_again_where_they_last() -> None:
    model = mobile()
    passes = "equalize,rescale,round,correct-bias"
    options = {"backend": "qnnpack", "recover": passes, "method": "fx", "dynamic_shapes": None}
    result = qc.quantize(model, (DATA[0],), DATA, **options)  # type: ignore[arg-type]
    once = qc.quantize(model, (DATA[0],), iter(DATA), **options)  # type: ignore[arg-type]
    assert result.report.recovery is not None
    assert "equalize: " in result.report.recovery.headline
    assert "kept" in result.report.recovery.headline.partition(";")[0]
    assert "must be seen again" in str(once.report.recovery)
    test = images(3)
    assert decibels(model, result.program, test) > decibels(model, once.program, test)


def test_the_noise_that_is_said_is_that_of_the_quantized_net() -> None:
    """What the judgments say of a whole net is within a few dB of what is measured."""
    model, test = mobile(), images(3)
    prepared = collected(model, DATA)
    better = qc.recover(prepared, "equalize", batches=DATA, progress="silent")
    kept = [each for each in better.log[-1].judgments if each.fate == "kept"]
    predicted = sum(each.gain or 0.0 for each in kept) / len(kept)
    measured = decibels(model, qc.convert(better), test) - decibels(model, qc.convert(prepared), test)
    assert abs(predicted - measured) < 8.0, (predicted, measured)
