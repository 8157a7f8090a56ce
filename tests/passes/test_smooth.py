"""smooth: factors go from activations to weights, through norms, attention and gates."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc.calibration.collect import key_of
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program
from tests.support.loud_channels import FACTOR, Gate, batches, loud
from tests.support.streams import HIDDEN, Attention, DecomposedRms


def smoothed(model: nn.Module, passes: str = "smooth") -> tuple[Program, Program, list[Judgment]]:
    """A calibrated program, the smoothed one, and what became of its groups."""
    data = batches()
    prepared = qc.prepare(qc.capture(model, data[0], method="fx", dynamic_shapes=None), "x86")
    qc.calibrate(prepared, data, collect="gram,extremes,moments")
    better = qc.recover(prepared, passes, batches=data, hooks=[Truth(), Verify(), Guard()])
    return prepared, better, [each for entry in better.log for each in entry.judgments]


def decibels(model: nn.Module, program: Program) -> float:
    quantized = qc.convert(program)
    pairs = [(model(*batch).detach(), quantized(*batch).detach()) for batch in batches(1)]
    noise = sum(float((one - other).square().sum()) for one, other in pairs)
    return float(10 * torch.log10(torch.tensor(sum(float(one.square().sum()) for one, _ in pairs) / noise)))


def why(judgments: list[Judgment]) -> str:
    return "\n".join(f"{each.site}: {each.reason}" for each in judgments if each.fate == "refused")


def test_large_channels_are_smoothed_and_the_noise_falls() -> None:
    model = loud(Gate(nn.LayerNorm(HIDDEN)))
    before, after, judgments = smoothed(model)
    assert any(each.fate == "kept" and "layer_norm" in each.site for each in judgments)
    assert decibels(model, after) > decibels(model, before) + 6


def test_r1_a_gain_of_one_plus_w_is_scaled_as_a_whole() -> None:
    model = loud(Gate(DecomposedRms()))
    before, after, _ = smoothed(model)
    assert decibels(model, after) > decibels(model, before) + 6
    for batch in batches(2):
        torch.testing.assert_close(after(*batch), model(*batch), atol=1e-5, rtol=1e-4)


def test_r2_a_result_that_is_normalized_afterwards_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.last = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(F.rms_norm(self.norm(self.q(x)), (HIDDEN,)))
            return out

    _, _, judgments = smoothed(Twice().eval())
    assert not any(each.fate == "kept" for each in judgments)
    assert "normalises it" in why(judgments)


def test_r3_signed_activations_of_mean_zero() -> None:
    """Importance is a mean square, never a mean: that of signed channels is about nothing."""
    model = loud(Gate(nn.LayerNorm(HIDDEN)))
    data = [(torch.cat([x, -x]),) for (x,) in batches()]
    prepared = qc.prepare(qc.capture(model, data[0], method="fx", dynamic_shapes=None), "x86")
    qc.calibrate(prepared, data, collect="recover")
    better = qc.recover(prepared, "smooth", batches=data)
    assert all(bool(value.isfinite().all()) for value in better.parameters())
    assert bool(better(*data[0]).isfinite().all())
    assert any(each.fate == "kept" for entry in better.log for each in entry.judgments)


def test_r7_a_tied_weight_stays() -> None:
    model = Gate(nn.LayerNorm(HIDDEN))
    model.up.weight = model.gate.weight
    _, _, judgments = smoothed(model.eval())
    assert not any(each.fate == "kept" and "layer_norm" in each.site for each in judgments)
    assert "read more than once" in why(judgments)


def test_r8_a_gain_whose_result_is_also_read_elsewhere_stays() -> None:
    model = loud(Gate(nn.LayerNorm(HIDDEN), twice=True))
    before, after, judgments = smoothed(model)
    assert not any(each.fate == "kept" and "layer_norm" in each.site for each in judgments)
    assert torch.equal(after(*batches()[0]), before(*batches()[0]))


def test_values_are_smoothed_per_head_and_tied_where_heads_share_them() -> None:
    """Each head of keys and values serves two of the queries: their columns have one factor."""
    torch.manual_seed(0)
    model = Attention().eval()
    with torch.no_grad():
        model.v.weight[3] *= FACTOR
        model.v.bias[3] *= FACTOR
        model.o.weight[:, [3, 7]] /= FACTOR
    _, after, judgments = smoothed(model)
    assert any(each.fate == "kept" for each in judgments), judgments
    value = dict(after.root.named_parameters()) | dict(after.root.named_buffers())
    rows = (value["v.weight"] / model.v.weight).detach()
    columns = (value["o.weight"] / model.o.weight).detach()
    factors = rows.mean(1)
    assert float(factors.min()) < float(factors.max())
    for column in range(HIDDEN):
        shared = column // 4 // 2 * 4 + column % 4
        torch.testing.assert_close(columns[:, column], (1 / factors[shared]).expand(HIDDEN))


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_carried_statistics_are_those_that_are_seen_again(seed: int) -> None:
    model = loud(Gate(nn.LayerNorm(HIDDEN)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(torch.exp(torch.randn(value.shape, generator=generator) / 2))
    _, after, _ = smoothed(model)
    again = after.draft()
    again.plan.collected, again.plan.statistics = {}, {}
    qc.calibrate(again, batches(), collect="gram,extremes,moments")
    for name in (key for key in again.plan.collected if key.startswith((key_of("gram", ""), key_of("extremes", "")))):
        one, other = after.plan.collected[name], again.plan.collected[name]
        for half in ("even", "odd"):
            mine, seen = (getattr(each, half) for each in (one, other))
            for end in ("low", "high"):
                if hasattr(seen, end):
                    torch.testing.assert_close(getattr(mine, end), getattr(seen, end), rtol=1e-5, atol=1e-5)
            if hasattr(seen, "value"):
                torch.testing.assert_close(mine.value(), seen.value(), rtol=1e-3, atol=1e-3)


def test_plain_chains_are_left_to_equalize_and_it_does_nothing_twice() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 24), nn.ReLU(), nn.Linear(24, 4)).eval()
    assert smoothed(model)[2] == []
    _, after, _ = smoothed(loud(Gate(nn.LayerNorm(HIDDEN))), "smooth,smooth")
    assert [entry.changed for entry in after.log if entry.name == "smooth"] == [True, False]
