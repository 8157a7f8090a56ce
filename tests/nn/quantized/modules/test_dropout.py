"""Dropout of quantized tensors: none, in training too."""

from __future__ import annotations

import torch
from torch import nn

from quantc.nn import quantize_per_tensor, quantized


def test_nothing_is_dropped_in_either_mode() -> None:
    made = quantized.Dropout(0.9)
    x = quantize_per_tensor(torch.ones(100), 0.5, 3)
    assert made.train()(x) is x
    assert made.eval()(x) is x


def test_it_keeps_the_settings_of_the_float_module() -> None:
    made = quantized.Dropout.from_float(nn.Dropout(0.3, inplace=True))
    assert (made.p, made.inplace) == (0.3, True)
    assert repr(made) == "QuantizedDropout(p=0.3, inplace=True)"
    assert made.state_dict() == {}
