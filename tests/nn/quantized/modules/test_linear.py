"""The quantized linear layer, and where quantized tensors begin and end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quantc.errors import QuantcError
from quantc.nn import observers, quantized
from quantc.nn.stubs import QuantStub
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


ao: Any = ao_quantized
"""The oracle; its modules have no types."""


def test_numbers_are_rounded_onto_the_grid_and_back() -> None:
    made = quantized.Quantize(0.5, 3, torch.qint8)
    q = made(torch.tensor([1.2, -0.3, 100.0]))
    assert q.int_repr().tolist() == [5, 2, 127]
    assert q.dtype is made.dtype is torch.int8
    assert quantized.DeQuantize()(q).tolist() == [1.0, -0.5, 62.0]


def test_a_grid_is_held_in_buffers_as_torch_has_them() -> None:
    ours, theirs = quantized.Quantize(0.5, 3), ao.Quantize(0.5, 3, torch.quint8)
    for name, tensor in theirs.state_dict().items():
        assert ours.state_dict()[name].tolist() in (tensor.tolist(), tensor.item()), name
    assert (ours.scale.shape, ours.zero_point.shape) == (theirs.scale.shape, theirs.zero_point.shape)
    other = quantized.Quantize(1.0, 0)
    other.load_state_dict(theirs.state_dict())
    assert other.grid == (0.5, 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused_by_the_place_it_comes_in(bad: float) -> None:
    made = quantized.Quantize(0.5, 3)
    with pytest.raises(QuantcError, match="Quantize"):
        made(torch.tensor([bad]))
    made.place = "encoder.quant"
    with pytest.raises(QuantcError, match=r"encoder\.quant"):
        made(torch.tensor([bad]))


def test_a_stub_becomes_the_grid_that_was_observed() -> None:
    stub: Any = QuantStub()
    stub.activation_post_process = observers.MinMaxObserver()
    stub.activation_post_process(torch.tensor([-1.0, 1.55]))
    made = quantized.Quantize.from_float(stub)
    assert made.grid[0] == pytest.approx(0.01)
    assert made.grid[1] == 100
    with pytest.raises(QuantcError, match="Quantize"):
        quantized.Quantize.from_float(QuantStub())


def test_a_layer_shows_its_sizes_its_grid_and_its_scheme() -> None:
    assert repr(quantized.Linear(3, 2, bias_=False)) == (
        "QuantizedLinear(in_features=3, out_features=2, bias=False, scale=1, zero_point=0, "
        "qscheme=torch.per_tensor_affine)"
    )
    assert quantized.Linear(3, 2, bias=False).bias() is None
