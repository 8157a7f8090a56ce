"""The quantized linear layer, and where quantized tensors begin and end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.nn_cases import both, case_of, engine, steps_apart


@pytest.mark.parametrize("engine_name", ["fbgemm", "x86", "onednn", "qnnpack"])
@settings(max_examples=10)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    zero=st.integers(0, 255),
)
def test_any_linear(engine_name: str, rows: int, inputs: int, outputs: int, bias: bool, zero: int) -> None:
    made = case_of("Linear", lambda: nn.Linear(inputs, outputs, bias), (rows, inputs), engine=engine_name)
    with engine(engine_name):
        torch.manual_seed(rows)
        x = torch.randn(made.shape)
        ours, theirs = made.pair(x)
        ours_x, theirs_x = both(x, (0.031, zero))
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1
