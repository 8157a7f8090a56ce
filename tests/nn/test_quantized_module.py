"""What all quantized modules have in common: the grid of their result, and how they are saved and loaded."""

from __future__ import annotations

import pytest
import torch

from quantc.nn import quantized
from quantc.nn.quantized import dynamic


def test_formats_stay() -> None:
    made = quantized.Linear(4, 2)
    before = made.state_dict()
    for change in (made.half, made.double, made.float):
        change()
        after = made.state_dict()
        assert all(after[name].dtype is tensor.dtype for name, tensor in before.items())


def test_a_bias_that_is_missing_is_missed() -> None:
    for kind in (quantized.Linear, dynamic.Linear):
        made = kind(4, 2)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\).*bias"):
            made.load_state_dict(kind(4, 2, bias_=False).state_dict())
        with pytest.raises(RuntimeError, match="has the shape"):
            made.load_state_dict(kind(5, 2).state_dict())
    bare = {name: value for name, value in dynamic.Linear(4, 2).state_dict().items() if "scale" not in name}
    with pytest.raises(RuntimeError, match="no weight_scale"):
        dynamic.Linear(4, 2).load_state_dict(bare)
    with pytest.raises(RuntimeError, match="Unexpected"):
        quantized.Linear(4, 2).load_state_dict({**quantized.Linear(4, 2).state_dict(), "other": torch.zeros(1)})
