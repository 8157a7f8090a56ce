"""Signal and noise over batches, against NumPy, and the corners of their ratio."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantc.errors import QuantcError
from quantc.support.sqnr import Noise, add_outputs, as_data, check_alike, format_sqnr, together

INF, NAN = math.inf, math.nan


def test_masks_of_infinity_are_neither_signal_nor_noise() -> None:
    noise = Noise()
    masked = torch.tensor([1.0, -math.inf, 2.0])
    assert noise.add(masked, masked + torch.tensor([0.1, 0.0, 0.0]))
    assert noise.sqnr == pytest.approx(10 * math.log10(5 / 0.01), abs=1e-4)
    noise.add(torch.tensor([1.0]), torch.tensor([math.nan]))
    assert math.isnan(noise.sqnr)


def test_the_ratio_over_batches_is_that_of_all_the_data() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(3, 4), torch.randn(3, 4) * 0.01) for _ in range(3)]
    noise, parts = Noise(), []
    for reference, error in batches:
        assert noise.add(reference, reference + error)
        parts.append(Noise())
        parts[-1].add(reference, reference + error)
    signal = np.concatenate([reference.numpy() for reference, _ in batches]).astype(np.float64)
    value = np.concatenate([(reference + error).numpy() for reference, error in batches]).astype(np.float64)
    expected = 10 * np.log10((signal**2).sum() / ((value - signal) ** 2).sum())
    assert noise.sqnr == pytest.approx(expected, abs=1e-4)
    assert together(parts).sqnr == pytest.approx(noise.sqnr)
    assert (noise.count, together(parts).count) == (36, 36)


def test_without_noise_signal_or_data_the_ratio_has_no_end() -> None:
    one, zero = torch.ones(2), torch.zeros(2)
    ratios = []
    for reference, value in ((one, one), (zero, one), (zero, zero), (one, one * NAN)):
        noise = Noise()
        noise.add(reference, value)
        ratios.append(noise.sqnr)
    assert str([Noise().sqnr, *ratios]) == "[nan, inf, -inf, inf, nan]"


def test_pairs_are_found_in_trees_and_only_floats_of_one_shape_count() -> None:
    noise = Noise()
    reference = {"a": torch.ones(2), "b": [torch.tensor([1]), torch.ones(3)], "c": "text"}
    value = {"a": torch.zeros(2), "b": [torch.tensor([2]), torch.ones(4)], "c": "text"}
    assert noise.add(reference, value)
    assert [noise.signal, noise.noise, noise.count] == pytest.approx([2, 2, 2])
    assert not noise.add([torch.tensor([1])], [torch.tensor([1])])
    assert not noise.add([torch.ones(1)], [torch.ones(1), torch.ones(1)])


def test_outputs_are_kept_apart_with_their_largest_difference() -> None:
    noises: list[Noise] = []
    largest: list[float] = []
    add_outputs([torch.ones(2), torch.zeros(1)], [torch.tensor([1.0, 1.5]), torch.zeros(1)], noises, largest)
    add_outputs([torch.ones(2), torch.zeros(1)], [torch.tensor([0.25, 1.0]), torch.zeros(1)], noises, largest)
    assert largest == [0.75, 0.0]
    assert [noise.sqnr == INF for noise in noises] == [False, True]
    add_outputs(
        [torch.ones(2), torch.tensor([-INF])], [torch.tensor([NAN, 1.0]), torch.tensor([-INF])], noises, largest
    )
    add_outputs([torch.ones(2), torch.zeros(1)], [torch.tensor([9.0, 1.0]), torch.zeros(1)], noises, largest)
    assert math.isnan(largest[0]), "NaN is worse than any number"
    assert largest[1] == 0.0, "an infinity in both is no difference"


def test_outputs_that_cannot_be_compared_are_refused_with_every_fault() -> None:
    check_alike([torch.ones(2), "text"], [torch.zeros(2), 3], ("left", "right"))
    with pytest.raises(QuantcError, match="left and right") as caught:
        check_alike([torch.ones(2), torch.ones(1)], [torch.ones(3)], ("left", "right"))
    assert "2 and 1 outputs" in caught.value.what
    assert "output 0 is [2] and [3]" in caught.value.what


def test_ratios_in_tables_and_in_data() -> None:
    values = [12.34, INF, -INF, NAN, None]
    assert [format_sqnr(value) for value in values] == ["12.3", "equal", "all noise", "NaN", ""]
    assert [as_data(value) for value in values] == [12.34, "inf", "-inf", "nan", None]
