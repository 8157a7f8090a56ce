"""One op of the integer form on the best kernel of a target, outside of any program."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import QuantcError
from quantc.nn import quantize_per_tensor, quantized


def test_engines_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = quantize_per_tensor(torch.randn(3, 4), 0.1, 5)
    assert quantized.Linear(4, 2)(x).shape == (3, 2)
    monkeypatch.setattr("quantc.nn.kernel_ops.TARGETS", {})
    with pytest.raises(QuantcError, match="no kernels for the engine"):
        quantized.Linear(4, 2)(x)
