"""Weights made of floats by an observer: on the grid and within the levels that it allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantc.errors import SpecError
from quantc.nn import fake_quantize, observers
from quantc.nn.observed_weights import TABLE_DTYPES, WEIGHT_DTYPES, check_weight_dtype, observed_weight, quantize_weight

WEIGHT = torch.tensor([[0.5, -1.0, 0.25], [4.0, -2.0, 1.0]])


def test_one_scale_for_the_whole_weight() -> None:
    made = observed_weight(WEIGHT, observers.default_weight_observer())
    wanted = torch.quantize_per_tensor(WEIGHT, 4.0 / 127.5, 0, torch.qint8)
    assert made.q_scale() == pytest.approx(4.0 / 127.5)
    assert torch.equal(made.int_repr(), wanted.int_repr())


def test_a_scale_for_each_channel_along_the_axis_of_the_observer() -> None:
    made = observed_weight(WEIGHT, observers.default_per_channel_weight_observer.with_args(ch_axis=1)())
    assert made.q_per_channel_axis() == 1
    assert made.q_per_channel_scales().tolist() == pytest.approx([4 / 127.5, 2 / 127.5, 1 / 127.5])


def test_float_zero_points_are_those_of_tables() -> None:
    made = observed_weight(WEIGHT, observers.default_float_qparams_observer())
    wanted = torch.quantize_per_channel(
        WEIGHT,
        made.q_per_channel_scales(),
        made.q_per_channel_zero_points(),
        0,
        torch.quint8,
    )
    assert made.qscheme() is torch.per_channel_affine_float_qparams
    assert torch.equal(made.int_repr(), wanted.int_repr())
    assert made.int_repr().amin(1).tolist() == [0, 0]
    assert made.int_repr().amax(1).tolist() == [255, 255]


@pytest.mark.parametrize("make", [fake_quantize.fused_wt_fake_quant_range_neg_127_to_127, None])
def test_levels_beyond_the_range_of_the_observer_are_clipped(make: Any) -> None:
    """The scale was found for smaller numbers, and -128 is not allowed: neither by a fake quantizer nor by an observer."""
    observer = observers.weight_observer_range_neg_127_to_127() if make is None else make()
    observer(torch.tensor([-1.0, 1.0]))
    assert quantize_weight(torch.tensor([-5.0, 5.0, 1.0]), observer).int_repr().tolist() == [-127, 127, 127]


def test_a_fake_quantizer_may_leave_the_range_to_the_observer_within() -> None:
    observer = observers.weight_observer_range_neg_127_to_127()
    observer(torch.tensor([-1.0, 1.0]))
    outer = SimpleNamespace(
        calculate_qparams=observer.calculate_qparams,
        dtype=observer.dtype,
        qscheme=observer.qscheme,
        activation_post_process=observer,
    )
    assert quantize_weight(torch.tensor([-5.0]), outer).int_repr().tolist() == [-127]


def test_a_weight_is_looked_at_only_where_asked() -> None:
    observer = observers.default_weight_observer()
    observer(torch.tensor([-1.0, 1.0]))
    assert observed_weight(WEIGHT, observer, observe=False).q_scale() == pytest.approx(1 / 127.5)
    assert observed_weight(WEIGHT, observer).q_scale() == pytest.approx(4 / 127.5)


def test_schemes_that_weights_do_not_have_are_refused() -> None:
    observer = SimpleNamespace(
        calculate_qparams=lambda: (torch.ones(1), torch.zeros(1)), dtype=torch.qint8, qscheme="rows of two"
    )
    with pytest.raises(SpecError, match="rows of two"):
        quantize_weight(WEIGHT, observer)


def test_weight_observers_of_other_dtypes_are_refused_with_those_that_fit() -> None:
    check_weight_dtype(observers.default_weight_observer(), WEIGHT_DTYPES, "Linear")
    check_weight_dtype(observers.default_float_qparams_observer_4bit(), TABLE_DTYPES, "Embedding")
    with pytest.raises(SpecError, match=r"torch\.quint8.*torch\.int8") as caught:
        check_weight_dtype(observers.MinMaxObserver(), WEIGHT_DTYPES, "layer.2")
    assert caught.value.where == "layer.2"
