"""Scale and zero point by a function of the user's own, and by the one that observers have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import Tensor

from quantc.errors import DataError
from quantc.flows.eager.user_observer import UserObserver, _calculate_qparams
from quantc.nn.observers import MinMaxObserver, PerChannelMinMaxObserver

X = torch.tensor([[-1.0, 3.0], [0.5, 2.0]])


def power_of_two(observer: Any) -> tuple[float, int]:
    """The next power of two above the largest value, over 128 levels."""
    largest = float(max(-observer.min_val, observer.max_val))
    return float(2.0 ** math.ceil(math.log2(largest))) / 128, 0


def test_the_function_is_shown_what_the_observer_has_seen() -> None:
    observer = UserObserver(power_of_two, dtype=torch.qint8)
    assert torch.equal(observer(X), X)
    scale, zero_point = observer.calculate_qparams()
    assert scale.tolist() == [4 / 128]
    assert zero_point.tolist() == [0]
    assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)


def test_it_stands_for_the_observer_inside() -> None:
    inside = {"qscheme": torch.per_channel_symmetric, "dtype": torch.qint8, "ch_axis": 1}
    observer = UserObserver(power_of_two, PerChannelMinMaxObserver, **inside)
    assert (observer.dtype, observer.qscheme, observer.ch_axis) == (torch.qint8, torch.per_channel_symmetric, 1)
    assert (observer.quant_min, observer.quant_max) == (-128, 127)


def test_one_scale_for_each_channel() -> None:
    def given(observer: Any) -> tuple[list[float], list[int]]:
        return [0.5, 0.25], [1, 2]

    by_channel = UserObserver(given, PerChannelMinMaxObserver, dtype=torch.qint8)
    by_channel(X)
    assert [value.tolist() for value in by_channel.calculate_qparams()] == [[0.5, 0.25], [1, 2]]
    with pytest.raises(DataError, match="one scale"):
        UserObserver(given, MinMaxObserver).calculate_qparams()


@pytest.mark.parametrize(
    ("scale", "zero_point", "words"),
    [
        (0.0, 0, "positive"),
        (-1.0, 0, "positive"),
        (math.inf, 0, "finite"),
        (math.nan, 0, "finite"),
        (1.0, 256, "level"),
        (1.0, -1, "level"),
        (1.0, [0, 1], "as many"),
    ],
)
def test_what_makes_no_grid_is_refused_with_the_function(scale: float, zero_point: Any, words: str) -> None:
    def mine(observer: Any) -> tuple[float, Any]:
        return scale, zero_point

    with pytest.raises(DataError, match=words) as caught:
        UserObserver(mine).calculate_qparams()
    assert "mine" in str(caught.value)
    assert "0..255" in str(caught.value.advice)


@pytest.mark.parametrize("zero_point", [0, 255])
def test_the_ends_of_the_range_are_levels(zero_point: int) -> None:
    assert UserObserver(lambda _: (1.0, zero_point)).calculate_qparams()[1].tolist() == [zero_point]


@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 3.0), (-3.0, -0.5), (0.0, 0.0)])
@pytest.mark.parametrize("reduce_range", [False, True])
def test_the_function_of_observers_gives_what_torchs_gives(
    qscheme: torch.qscheme, low: float, high: float, reduce_range: bool
) -> None:
    keywords: dict[str, Any] = {"dtype": torch.qint8, "qscheme": qscheme, "reduce_range": reduce_range}
    ends: tuple[Tensor, Tensor] = torch.tensor(low), torch.tensor(high)
    theirs: Any = ao.MinMaxObserver(**keywords)
    for ours, wanted in zip(_calculate_qparams(*ends, **keywords), theirs._calculate_qparams(*ends), strict=True):
        assert torch.equal(ours.reshape(-1), wanted.reshape(-1).to(ours.dtype))


def test_the_range_of_levels_can_be_given() -> None:
    scale, zero_point = _calculate_qparams(torch.tensor(0.0), torch.tensor(30.0), quant_min=0, quant_max=15)
    assert (scale.item(), zero_point.item()) == (2.0, 0)
