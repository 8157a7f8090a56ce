"""TorchScript: what it cannot read is refused with the reason and another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import ModeError
from quantc.nn import quantize_per_tensor, quantized
from quantc.nn.fake_quantize import default_fake_quant
from quantc.nn.observers import MinMaxObserver
from quantc.nn.quantized import dynamic

jit: Any = torch.jit


@pytest.mark.parametrize(
    "module",
    [quantized.Linear(4, 2), dynamic.Linear(4, 2), quantized.LayerNorm(4), quantized.DeQuantize()],
    ids=lambda module: type(module).__name__,
)
def test_quantized_modules_are_not_scripted(module: nn.Module) -> None:
    with pytest.raises(ModeError, match=type(module).__name__) as caught:
        torch.jit.script(nn.Sequential(module))
    assert caught.value.where == "torch.jit.script"
    assert "to_program" in str(caught.value.advice)


@pytest.mark.parametrize("module", [quantized.Linear(4, 2), quantized.LayerNorm(4), quantized.DeQuantize()])
def test_quantized_modules_are_not_traced(module: nn.Module) -> None:
    x: Any = quantize_per_tensor(torch.randn(3, 4), 0.1, 5)
    module(x)  # which works
    model = nn.Sequential(quantized.Quantize(0.1, 5), module)
    with pytest.raises(ModeError, match=r"torch\.jit\.trace|as it runs") as caught:
        jit.trace(model, torch.randn(3, 4), check_trace=False)
    assert caught.value.where == "torch.jit.trace"


@pytest.mark.parametrize("make", [MinMaxObserver, default_fake_quant])
def test_observers_are_not_scripted(make: Any) -> None:
    observer = make()
    with pytest.raises(ModeError, match=f"{type(observer).__name__} looks at numbers"):
        torch.jit.script(nn.Sequential(nn.Linear(4, 2), observer))
