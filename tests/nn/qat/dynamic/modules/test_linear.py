"""The linear layer that is trained to be converted to a dynamic one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.qat.dynamic as ao_qat_dynamic
import torch.ao.quantization
from torch import nn

from quantc.errors import SpecError
from quantc.nn.fake_quantize import default_fake_quant
from quantc.nn.module_tables import DYNAMIC_MODULES
from quantc.nn.observers import MinMaxObserver, MovingAverageMinMaxObserver, default_dynamic_quant_observer
from quantc.nn.qat import dynamic
from quantc.nn.qconfig import QConfig, default_dynamic_qat_qconfig, default_qat_qconfig

ao: Any = torch.ao.quantization


def source() -> Any:
    torch.manual_seed(0)
    made: Any = nn.Linear(6, 4)
    made.qconfig = default_dynamic_qat_qconfig
    return made


def test_what_it_computes_in_training_is_torchs() -> None:
    ours, plain = dynamic.Linear.from_float(source()), source()
    plain.qconfig = ao.default_dynamic_qat_qconfig
    theirs = ao_qat_dynamic.Linear.from_float(plain)  # type: ignore[no-untyped-call]
    x = torch.randn(3, 6)
    assert torch.equal(ours(x), theirs(x))


def test_it_becomes_the_dynamic_layer_with_the_weight_it_learned() -> None:
    made = dynamic.Linear.from_float(source())
    converted: Any = DYNAMIC_MODULES[dynamic.Linear]
    layer = converted.from_float(made.eval())
    assert torch.equal(layer.bias(), made.bias)
    assert float((layer.weight().dequantize() - made.weight).detach().abs().max()) <= layer.weight().q_scale() * 0.51


@pytest.mark.parametrize(
    "activation", [default_qat_qconfig.activation, MinMaxObserver, MovingAverageMinMaxObserver], ids=str
)
def test_observers_that_remember_earlier_batches_are_refused(activation: Any) -> None:
    with pytest.raises(SpecError, match="each batch anew"):
        dynamic.Linear(6, 4, qconfig=QConfig(activation, default_qat_qconfig.weight))


@pytest.mark.parametrize(
    "activation",
    [
        default_dynamic_quant_observer,
        MovingAverageMinMaxObserver.with_args(averaging_constant=1),
        default_fake_quant.with_args(averaging_constant=1),
    ],
    ids=str,
)
def test_observers_that_start_anew_are_taken(activation: Any) -> None:
    made = dynamic.Linear(6, 4, qconfig=QConfig(activation, default_qat_qconfig.weight))
    assert made(torch.randn(3, 6)).shape == (3, 4)
