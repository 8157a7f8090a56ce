"""Ranges from histograms: against what the data itself says, and against torch's histogram observer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.ao.quantization.observer import HistogramObserver

from quantc.errors import ObservationError
from quantc.observe import Histogram, start
from quantc.observe.ranges import squared_error
from quantc.spec.formats import PerChannel
from quantc.spec.numerics import QParams, fake_quantize, qparams_from_range, qparams_of
from quantc.spec.spec import INT8, INT8_WEIGHT, UINT8, QuantSpec


def histogram_of(x: Tensor) -> Histogram:
    histogram = Histogram()
    histogram.update(x)
    return histogram


def error_of(x: Tensor, qparams: QParams, spec: QuantSpec) -> float:
    return float((fake_quantize(x, qparams, spec) - x).double().square().sum())


def sqnr(x: Tensor, qparams: QParams, spec: QuantSpec) -> float:
    return 10 * math.log10(float(x.double().square().sum()) / error_of(x, qparams, spec))


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1 << 15, generator=generator)
    heavy = normal * torch.rand(1 << 15, generator=generator).pow(-0.4)
    outlier = normal.clone()
    outlier[7] = 25.0
    return {
        "normal": normal,
        "relu": normal.relu(),
        "heavy": heavy,
        "gelu": torch.nn.functional.gelu(normal * 2),
        "shifted": normal + 3,
        "outlier": outlier,
    }


SAMPLES = samples()
HISTOGRAMS = {name: histogram_of(x) for name, x in SAMPLES.items()}
EIGHT = [INT8, UINT8, INT8.but(scheme="symmetric")]
FOUR = [INT8.but(dtype="int4"), INT8.but(dtype="int4", scheme="symmetric")]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("spec", [*EIGHT, *FOUR], ids=str)
def test_the_estimated_error_is_the_error_of_the_data(name: str, spec: QuantSpec) -> None:
    x = SAMPLES[name]
    cells = HISTOGRAMS[name].cells()[0]
    reach = np.array([0.3, 0.6, 1.0])
    low, high = cells.low * reach, cells.high * reach
    estimated = squared_error(cells, np.minimum(low, 0), high, spec)
    for index in range(3):
        qparams = qparams_from_range(torch.tensor(min(low[index], 0.0)), torch.tensor(high[index]), spec)
        assert estimated[index] == pytest.approx(error_of(x, qparams, spec), rel=0.05)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("spec", [*EIGHT, *FOUR], ids=str)
def test_mse_finds_the_best_of_all_clippings(name: str, spec: QuantSpec) -> None:
    """A brute-force search over the data itself, by one factor for both ends, never does better by more than 2 %."""
    x = SAMPLES[name]
    found = error_of(x, HISTOGRAMS[name].qparams(spec.but(observe="mse")), spec)
    low, high = x.min().clamp(max=0), x.max()
    tried = [error_of(x, qparams_from_range(low * f, high * f, spec), spec) for f in np.linspace(0.1, 1, 31).tolist()]
    assert found <= min(tried) * 1.02


@pytest.fixture(scope="module")
def with_outliers() -> tuple[Tensor, Histogram]:
    """A million normal numbers, and two far from them."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    x[3], x[4] = 40.0, -35.0
    return x, histogram_of(x)


@pytest.mark.parametrize("spec", [*EIGHT, *FOUR], ids=str)
@pytest.mark.parametrize("method", ["mse", "l2norm", "entropy", "percentile{percentile=99.999}"])
def test_methods_beat_min_max_where_there_are_outliers(
    method: str, spec: QuantSpec, with_outliers: tuple[Tensor, Histogram]
) -> None:
    x, histogram = with_outliers
    by_min_max = sqnr(x, histogram.qparams(spec), spec)
    assert sqnr(x, histogram.qparams(spec.but(observe=method)), spec) > by_min_max + 3


def test_mse_is_never_worse_than_min_max() -> None:
    for name, x in SAMPLES.items():
        for spec in (*EIGHT, *FOUR):
            histogram = HISTOGRAMS[name]
            by_min_max = error_of(x, histogram.qparams(spec), spec)
            assert error_of(x, histogram.qparams(spec.but(observe="mse")), spec) <= by_min_max * 1.01, (name, str(spec))


@pytest.mark.parametrize("name", SAMPLES)
def test_percentiles_are_those_of_the_data(name: str) -> None:
    x = SAMPLES[name]
    spec = INT8.but(observe="percentile{percentile=99.0}")
    scale, zero_point = histogram_of(x).qparams(spec).one
    low, high = torch.quantile(x.double(), torch.tensor([0.01, 0.99], dtype=torch.float64)).tolist()
    width = max(high, 0.0) - min(low, 0.0)
    assert scale * 255 == pytest.approx(width, rel=0.02)
    assert (-128 - zero_point) * scale == pytest.approx(min(low, 0.0), abs=0.02 * width)


def test_the_whole_percentile_is_min_max() -> None:
    x = SAMPLES["heavy"]
    spec = INT8.but(observe="percentile{percentile=100.0}")
    assert histogram_of(x).qparams(spec).equals(qparams_of(x, INT8))


@pytest.mark.parametrize("name", SAMPLES)
def test_ranges_are_no_worse_than_torchs_histogram_observer(name: str) -> None:
    x = SAMPLES[name]
    theirs = HistogramObserver(dtype=torch.quint8, eps=UINT8.eps)
    theirs(x)
    scale, zero_point = theirs.calculate_qparams()
    peer = sqnr(x, QParams(scale.reshape(()), zero_point.reshape(()).long()), UINT8)
    assert sqnr(x, histogram_of(x).qparams(UINT8.but(observe="mse")), UINT8) >= peer - 0.1


def test_bit_width_scheme_and_method_are_decided_after_calibration() -> None:
    x = SAMPLES["normal"]
    histogram = start(INT8.but(observe="percentile"))
    histogram.update(x)
    specs = [INT8.but(dtype=f"int{bits}", observe="mse") for bits in range(2, 9)]
    heard = [sqnr(x, histogram.qparams(spec), spec) for spec in specs]
    # a bit more is worth 4 to 6 dB where the range is chosen well
    assert all(3.5 < wider - narrower < 6.5 for narrower, wider in itertools.pairwise(heard))
    assert histogram.qparams(INT8).equals(qparams_of(x, INT8))


def test_each_channel_gets_the_range_it_would_get_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(12, 300, generator=generator) * torch.logspace(-6, 3, 12).unsqueeze(1)
    w[5, 0] = 4e4
    spec = INT8_WEIGHT.but(dtype="int4", observe="mse")
    together = start(spec)
    together.update(w)
    found = together.qparams(spec)
    for channel, row in enumerate(w):
        alone = histogram_of(row).qparams(spec.but(granularity="per-tensor"))
        assert (float(found.scale[channel]), 0) == alone.one
    assert error_of(w, found, spec) <= error_of(w, qparams_of(w, spec), spec)


@pytest.mark.parametrize("method", ["mse", "entropy", "percentile", "minmax"])
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(10),
        torch.full((10,), 3.0),
        torch.full((10,), -3.0),
        torch.tensor([-0.0, 0.0]),
        torch.tensor([1e-45, -1e-45]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([torch.finfo(torch.float32).min, 0.0, 1.0]),
        torch.tensor([1e-30, 1e30]),
        torch.arange(100.0) * 1e-42,
    ],
    ids=str,
)
def test_odd_data_gives_sound_ranges(method: str, x: Tensor) -> None:
    for spec in (*EIGHT, *FOUR, INT8.but(dtype="int16"), INT8.but(dtype="int2")):
        scale, zero_point = histogram_of(x).qparams(spec.but(observe=method)).one
        assert spec.eps <= scale < math.inf
        assert spec.qmin <= zero_point <= spec.qmax


def test_a_mask_that_outweighs_everything_is_kept_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.where(torch.rand(10_000, generator=generator) < 0.3, -1e4, torch.randn(10_000, generator=generator))
    spec = INT8.but(scheme="symmetric", observe="mse")
    assert sqnr(x, histogram_of(x).qparams(spec), spec) > 60 > 50 > sqnr(x, qparams_of(x, spec), spec)


def test_searches_are_for_integer_formats() -> None:
    for method in ("mse", "entropy"):
        with pytest.raises(ObservationError, match="defined for integer formats"):
            histogram_of(torch.ones(3)).qparams(INT8.but(dtype="fp8_e4m3", observe=method))
    fine = INT8.but(dtype="fp8_e4m3", observe="percentile", granularity=PerChannel(axis=0))
    channels = start(fine)
    channels.update(torch.ones(3, 4))
    assert channels.qparams(fine).scale.shape == (3,)
