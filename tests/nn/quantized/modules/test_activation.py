"""Quantized activations: functions of one number, softmax, and ReLU with slopes."""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.nn.quantized as ao_quantized
from torch import nn

from quantc.nn import observers, quantized
from quantc.nn import qconfig as qconfigs
from tests.support.nn_cases import both, steps_apart


def test_prelu() -> None:
    torch.manual_seed(0)
    module: Any = nn.PReLU(4)
    module.weight.data = torch.tensor(
        [0.1, 0.6, 1.0, 0.3]
    )  # torch multiplies by 1 on the slopes' grid, which must hold it
    observer = observers.MinMaxObserver.with_args(dtype=torch.quint8)
    module.qconfig = qconfigs.QConfig(activation=observer, weight=observer)
    x = torch.randn(2, 4, 5)
    module.activation_post_process = observer()
    module.activation_post_process(module(x))
    ours = quantized.PReLU.from_float(module)
    theirs: Any = ao_quantized.PReLU.from_float(module)  # type: ignore[no-untyped-call]
    ours_x, theirs_x = both(x)
    assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1
    other = quantized.PReLU(num_parameters=4)
    other.load_state_dict(ours.state_dict())
    assert other(ours_x).equals(ours(ours_x))
