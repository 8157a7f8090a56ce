"""Qparams known beforehand: the data changes nothing, and what cannot be a scale is refused."""

from __future__ import annotations

import math

import pytest
import torch

from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.observe import FixedQParams, State, start
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.spec import INT8, UINT8
from tests.support.observations import observed


def test_fixed_qparams_ignore_the_data() -> None:
    spec = UINT8.but(observe="fixed{scale=0.00390625 zero_point=3}")
    fixed = observed(spec, [torch.randn(10) * 100])
    assert fixed.qparams(spec).one == (1 / 256, 3)
    assert fixed.merge(start(spec)).qparams(spec).one == (1 / 256, 3)
    with pytest.raises(ObservationError, match="cannot be merged"):
        fixed.merge(start(UINT8.but(observe="fixed{scale=0.5}")))
    with pytest.raises(DataError, match=r"outside -8\.\.7"):
        start(UINT8.but(observe="fixed{scale=0.5 zero_point=99}")).qparams(INT8.but(dtype="int4"))
    with pytest.raises(SpecError, match="scale: it must be a positive finite number"):
        UINT8.but(observe="fixed{scale=-1}")


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, True, "half", None])
def test_scales_that_are_not_positive_finite_numbers_are_refused(scale: float | str) -> None:
    with pytest.raises(SpecError, match="scale"):
        FixedQParams.empty(PerTensor(), {"scale": scale})


@pytest.mark.parametrize("zero_point", [0.5, True, "middle"])
def test_zero_points_that_are_not_whole_are_refused(zero_point: float | str) -> None:
    with pytest.raises(SpecError, match="zero_point"):
        FixedQParams.empty(PerTensor(), {"scale": 1.0, "zero_point": zero_point})


def test_other_options_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="'offset'"):
        FixedQParams.empty(PerTensor(), {"scale": 1.0, "offset": 3})


def test_zero_points_at_the_ends_of_the_range_are_taken_and_beyond_refused() -> None:
    for zero_point in (-128, 127):
        assert FixedQParams(0.5, zero_point).qparams(INT8).one == (0.5, zero_point)
    for zero_point in (-129, 128):
        with pytest.raises(DataError, match=f"{zero_point} is outside"):
            FixedQParams(0.5, zero_point).qparams(INT8, where="sigmoid:out0")


def test_channels_have_no_fixed_scale() -> None:
    with pytest.raises(ObservationError, match="per-channel"):
        FixedQParams(0.5).qparams(INT8.but(granularity=PerChannel(axis=0)))


def test_counts_are_added_and_read_back() -> None:
    spec = UINT8.but(observe="fixed{scale=0.5 zero_point=7}")
    merged = observed(spec, [torch.ones(3)]).merge(observed(spec, [torch.ones(2), torch.ones(4)]))
    assert merged.seen == 9
    loaded = FixedQParams.from_state(PerTensor(), merged.to_state())
    assert (loaded.scale, loaded.zero_point, loaded.seen) == (0.5, 7, 9)
    with pytest.raises(LoadError, match="zero_point"):
        FixedQParams.from_state(PerTensor(), State({}, {"scale": 0.5, "seen": 1}))
