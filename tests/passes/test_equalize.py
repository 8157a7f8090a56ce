"""Equalization: what it gains, and that a program computes what it did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.backends.x86 import X86
from quantc.hooks import Guard
from quantc.spec.formats import Timing
from quantc.spec.spec import INT8_TENSOR_WEIGHT
from tests.support.spread_nets import collected, decibels, images, mobile, residual

DATA, TEST = images(1), images(2)


@pytest.mark.parametrize(("model", "gain"), [(mobile(), 8.0), (residual(), 4.0)], ids=["mobile", "residual"])
def test_channels_far_apart_gain_on_data_that_nothing_was_fitted_to(model: nn.Module, gain: float) -> None:
    """Measured against the model in float, on images of their own; every float output keeps its bits."""
    prepared, guard = collected(model, DATA), Guard()
    better = qc.recover(prepared, "equalize", batches=DATA, hooks=[guard], progress="silent")
    assert guard.checked == ["equalize"]
    for x in TEST:
        assert torch.equal(better(x), prepared(x))
    before, after = (decibels(model, qc.convert(each), TEST) for each in (prepared, better))
    assert after > before + gain, (before, after)


def test_run_again_it_changes_nothing() -> None:
    better = qc.recover(collected(mobile(), DATA), "equalize", batches=DATA, progress="silent")
    again = qc.recover(better, "equalize", batches=DATA, progress="silent")
    assert not again.log[-1].changed
    assert "nothing has changed" in again.log[-1].notes[0]
    assert again.dump(plan=False) == better.dump(plan=False)


SIZES = torch.exp2(-torch.arange(8.0))


class Pair(nn.Module):
    """Two linears; the second reads some channels that are dead."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(torch.relu(self.one(x)))
        return result


def test_r10_biases_have_the_factors_of_their_rows() -> None:
    """With all weights of the first layer at zero, its output is its bias alone."""
    torch.manual_seed(0)
    model = Pair().eval()
    with torch.no_grad():
        model.one.weight.mul_(SIZES.unsqueeze(1))
        model.one.bias.copy_(SIZES * 3)
        model.two.weight.div_(SIZES)
    data = [torch.randn(32, 6) for _ in range(4)]
    prepared = collected(model, data)
    better = qc.recover(prepared, "equalize", batches=data, progress="silent")
    assert better.log[-1].changed
    assert torch.equal(better(torch.zeros(32, 6)), prepared(torch.zeros(32, 6)))
    bias = better.tensor(better.node("one_bias"))
    assert bias is not None
    assert not torch.equal(bias, model.one.bias)


def test_dead_channels_and_rows_do_no_harm() -> None:
    torch.manual_seed(0)
    model = Pair().eval()
    with torch.no_grad():
        model.one.weight[2], model.one.bias[2] = 0, 0
        model.one.weight[3], model.one.bias[3] = 0, -1
        model.two.weight[:, 4] = 0
        model.one.weight[5] *= 1e-30
    data = [torch.randn(32, 6) for _ in range(4)]
    prepared = collected(model, data)
    better = qc.recover(prepared, "equalize", batches=data, progress="silent")
    assert all(bool(torch.isfinite(value).all()) for value in better.root.state_dict().values())
    torch.testing.assert_close(better(data[0]), prepared(data[0]), rtol=0, atol=0)


def test_r9_bounds_are_kept_unless_they_are_not_met() -> None:
    """relu6 keeps what it reads; on request, channels that stayed below 6 in calibration may have factors."""
    model = mobile(nn.ReLU6)
    prepared = collected(model, DATA)
    kept = qc.recover(prepared, "equalize", batches=DATA, progress="silent")
    assert "clamp 0.0, 6.0" in str(kept.recovery())
    more = qc.recover(prepared, "equalize{bounds=seen}", batches=DATA, progress="silent")
    assert str(more.recovery()).count(": kept") > str(kept.recovery()).count(": kept")
    for x in DATA:
        assert torch.equal(more(x), prepared(x))


def test_weights_alone_need_no_batches_again() -> None:
    """With weights in four bits and floats between, no range changes."""
    torch.manual_seed(0)
    model = Pair().eval()
    with torch.no_grad():
        model.one.weight.mul_(SIZES.unsqueeze(1))
        model.two.weight.div_(SIZES)
    data = [torch.randn(32, 6) for _ in range(4)]
    backend = replace(X86, modes={**X86.modes, "weight-only": INT8_TENSOR_WEIGHT.but(timing=Timing.WEIGHT_ONLY)})
    config = mode_config(quantizer_of(backend), "weight-only")
    prepared = qc.prepare(qc.capture(model, (data[0],)), backend, config=config)
    qc.calibrate(prepared, data, collect="recover", progress="silent")
    better = qc.recover(prepared, "equalize", progress="silent")
    assert [each.fate for each in better.log[-1].judgments] == ["refused", "refused", "kept"]


def _layers(first: nn.Linear, *between: nn.Module, last: nn.Linear) -> nn.Module:
    return nn.Sequential(first, *between, last).eval()


def _linear(outputs: int, rows: slice = slice(0), value: float = 0.0) -> nn.Linear:
    """Some rows of the weights, and their biases, have one value."""
    layer = nn.Linear(8, outputs)
    with torch.no_grad():
        layer.weight[rows] = value
        layer.bias[rows] = 0.0
    return layer


@pytest.mark.parametrize(
    "model",
    [
        _layers(_linear(8, slice(None)), nn.ReLU(), last=_linear(4)),
        _layers(_linear(8), nn.GELU(), nn.LayerNorm(8), last=_linear(4, slice(None))),
        _layers(_linear(8, slice(2, 3), 1e20), nn.ReLU(), last=_linear(4)),
    ],
    ids=["zero", "zero-last", "large-row"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_without_noise_and_with_too_much_of_it_are_left_by_name(model: nn.Module) -> None:
    data = [torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    result = qc.quantize(model, (data[0],), data, recover="equalize")
    assert torch.equal(result.prepared(data[0]), result.captured(data[0]))
    judgments = [each for entry in result.prepared.log for each in entry.judgments]
    assert judgments
    assert all(each.reason for each in judgments if each.fate != "kept")
    before, after = (program.state_dict() for program in (result.captured, result.prepared))
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    if max(float(tensor.abs().max()) for tensor in before.values()) < 1e20:
        assert any("adds no noise that can be counted" in each.reason for each in judgments)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
