"""Training beside torchao's PT2E, with the same observers: the same gradients, losses and weights."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import quantc as qc
from quantc.ir.program import Program
from tests.support.training_peers import RATE, STEPS, backend, trained


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def theirs(model: nn.Module, example: torch.Tensor) -> Any:
    from torchao.quantization.pt2e import (
        FakeQuantize,
        MovingAverageMinMaxObserver,
        MovingAveragePerChannelMinMaxObserver,
    )
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationSpec
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    act = QuantizationSpec(
        dtype=torch.uint8,
        quant_min=0,
        quant_max=255,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=FakeQuantize.with_args(
            observer=MovingAverageMinMaxObserver, averaging_constant=RATE, eps=2.0**-23
        ),
    )
    weight = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=FakeQuantize.with_args(
            observer=MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0, eps=2.0**-23
        ),
    )
    default = x86.get_default_x86_inductor_quantization_config(is_qat=True)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(dataclasses.replace(default, input_activation=act, output_activation=None, weight=weight))
    return prepare_qat_pt2e(export(model.train(), (example,), strict=True).module(), quantizer)


def both(model: nn.Module, example: torch.Tensor) -> tuple[Any, Program]:
    other = theirs(copy.deepcopy(model), example)
    return other, qc.prepare(qc.capture(copy.deepcopy(model).eval(), (example,)), backend(), qat=True)


@pytest.mark.slow
def test_a_network_has_the_gradients_of_pt2e() -> None:
    """Of one step: in later ones a rounding that tips in one of them, by the last bit of a sum, grows from layer to layer."""
    torch.manual_seed(1)
    x, target = torch.randn(16, 3, 8, 8), torch.randn(16, 5)
    models = both(network(), x)
    losses = [nn.functional.mse_loss(model(x), target) for model in models]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-6)
    expected, found = ({name: row.grad for name, row in model.named_parameters()} for model in models)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        own = found[name]
        assert own is not None
        assert gradient is not None
        assert torch.allclose(own, gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_a_layer_is_trained_as_by_pt2e() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    batches = [(torch.randn(16, 3, 8, 8), torch.randn(16, 6, 6, 6)) for _ in range(STEPS)]
    other, ours = both(model, batches[0][0])
    expected = trained(other, other.parameters(), batches)
    found = trained(ours, ours.parameters(), batches)
    assert found == pytest.approx(expected, rel=1e-5)
    state, wanted = ours.state_dict(), other.state_dict()
    for name in model.state_dict():
        assert torch.allclose(state[name].float(), wanted[name].float(), rtol=1e-5, atol=1e-5), name
