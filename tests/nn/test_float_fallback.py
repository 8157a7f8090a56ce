"""Quantized modules that compute in float32 between two roundings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
from torch import nn

from quantc.errors import MixedTensorsError, ObservationError
from quantc.nn import observers, quantize_per_tensor, quantized
from tests.support.nn_cases import both, steps_apart


def test_arguments_are_in_the_order_of_torchs() -> None:
    torch.manual_seed(0)
    weight, bias = torch.rand(6) + 0.5, torch.randn(6)
    for name, leading, x in (
        ("LayerNorm", (6,), torch.randn(3, 6)),
        ("GroupNorm", (2, 6), torch.randn(3, 6, 4)),
        ("InstanceNorm1d", (6,), torch.randn(3, 6, 4)),
    ):
        ours = getattr(quantized, name)(*leading, weight, bias, 0.0625, 110)
        theirs = getattr(ao_quantized, name)(*leading, nn.Parameter(weight), nn.Parameter(bias), 0.0625, 110)
        ours_x, theirs_x = both(x)
        assert steps_apart(ours(ours_x), theirs(theirs_x)) <= 1, name


def test_weight_bias_and_grid_may_be_given_by_name() -> None:
    weight, bias = torch.full((4,), 2.0), torch.ones(4)
    made = quantized.LayerNorm(4, weight=weight, bias=bias, scale=0.5, zero_point=9, eps=1e-3)
    assert (made.scale, made.zero_point, made.eps) == (0.5, 9, 1e-3)
    assert torch.equal(made.weight, weight)
    assert torch.equal(made.bias, bias)
    assert not made.weight.requires_grad


def observed(module: Any, x: torch.Tensor, dtype: torch.dtype = torch.quint8) -> Any:
    module.activation_post_process = observers.MinMaxObserver(dtype=dtype)
    module.activation_post_process(module(x))
    return module


def test_it_stays_in_evaluation_mode_with_tensors_of_its_own() -> None:
    source = observed(nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2))
    made = quantized.BatchNorm2d.from_float(source)
    before = copy.deepcopy(made.state_dict())
    made.train()
    assert not made.training
    x = quantize_per_tensor(torch.randn(4, 3, 2, 2) + 5, 0.1, 100)
    wanted = made(x)
    source.running_mean.fill_(99)
    source.weight.data.fill_(99)
    assert made(x).equals(wanted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_state_dicts_hold_the_grid_and_the_dtype_of_the_result() -> None:
    made = quantized.LayerNorm.from_float(observed(nn.LayerNorm(4), torch.randn(8, 4), torch.qint8))
    assert made.out_dtype is torch.int8
    other = quantized.LayerNorm(4)
    other.load_state_dict(made.state_dict())
    x = quantize_per_tensor(torch.randn(2, 4), 0.1, 100)
    assert other(x).equals(made(x))
    assert other(x).dtype is torch.int8
    state = {name: value for name, value in made.state_dict().items() if name != "scale"}
    with pytest.raises(RuntimeError, match=r"Missing key.*scale"):
        other.load_state_dict(state)


def test_results_that_nobody_observed_and_floats_are_refused() -> None:
    with pytest.raises(ObservationError, match="GroupNorm"):
        quantized.GroupNorm.from_float(nn.GroupNorm(1, 4))
    with pytest.raises(MixedTensorsError, match="LayerNorm"):
        quantized.LayerNorm(4)(torch.randn(2, 4))


def test_from_reference_takes_the_grid_it_is_given() -> None:
    made = quantized.LayerNorm.from_reference(nn.LayerNorm(4), 0.25, 3)
    assert (made.scale, made.zero_point) == (0.25, 3)
    assert "scale=0.25, zero_point=3" in repr(made)
