"""Observers that others wrote, as the engine sees them: a spec, and an observation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import Tensor, nn

from quantc.errors import LoadError, ObservationError, SpecError
from quantc.flows.foreign_observers import ObservedBy, has_seen, inner, is_observer, spec_of
from quantc.spec.formats import DType, PerChannel, PerTensor, Role, Scheme, Timing
from quantc.spec.observation import State

X = torch.tensor([[-1.0, 2.0], [0.5, 3.0]])
SYMMETRIC = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}


class Own(nn.Module):
    """As little as an observer of a user's own may have."""

    dtype, quant_min, quant_max = torch.quint8, None, None

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([0.5]), torch.tensor([3])


def shown(observer: Any) -> Any:
    observer(X)
    return observer


def test_an_observer_is_whatever_can_be_asked_for_a_scale() -> None:
    assert is_observer(ao.MinMaxObserver())
    assert is_observer(Own())
    assert not is_observer(nn.Identity())
    assert not is_observer(ao.MinMaxObserver)


def test_a_fake_quantizer_stands_for_the_observer_in_it() -> None:
    fake: Any = ao.FakeQuantize()  # type: ignore[no-untyped-call]
    assert inner(fake) is fake.activation_post_process
    plain = ao.MinMaxObserver()
    assert inner(plain) is plain


@pytest.mark.parametrize("kind", [ao.MinMaxObserver, ao.PerChannelMinMaxObserver, ao.HistogramObserver])
def test_data_is_seen_in_the_buffers(kind: Any) -> None:
    observer = kind()
    assert not has_seen(observer)
    assert has_seen(shown(observer))


def test_fixed_scales_need_no_data() -> None:
    assert has_seen(ao.FixedQParamsObserver(scale=0.5, zero_point=0))  # type: ignore[no-untyped-call]
    assert not has_seen(Own())


def test_a_spec_has_what_the_observer_has() -> None:
    weight = spec_of(ao.PerChannelMinMaxObserver.with_args(**SYMMETRIC, ch_axis=1), Role.WEIGHT)
    assert (weight.dtype, weight.scheme, weight.granularity) == (DType.INT8, Scheme.SYMMETRIC, PerChannel(axis=1))
    narrow = spec_of(ao.MinMaxObserver(dtype=torch.qint8, quant_min=-7, quant_max=7, eps=0.25))
    assert (narrow.qmin, narrow.qmax, narrow.eps) == (-7, 7, 0.25)
    whole = spec_of(Own())
    assert (whole.qmin, whole.qmax, whole.granularity) == (0, 255, PerTensor())


def test_what_is_observed_goes_by_the_attributes() -> None:
    assert spec_of(ao.MovingAverageMinMaxObserver(averaging_constant=0.25)).observe.name == "moving-average"
    fixed = spec_of(ao.FixedQParamsObserver(scale=0.5, zero_point=3)).observe  # type: ignore[no-untyped-call]
    assert (fixed.name, dict(fixed.options)) == ("fixed", {"scale": 0.5, "zero_point": 3})
    assert spec_of(ao.HistogramObserver()).observe.name == "histogram"
    assert spec_of(ao.MinMaxObserver()).observe.name == "minmax"


def test_scales_found_as_it_runs_and_weights_in_half_are_told() -> None:
    dynamic: Any = ao.PlaceholderObserver(dtype=torch.quint8, quant_min=0, quant_max=255, is_dynamic=True)
    assert spec_of(dynamic).timing is Timing.DYNAMIC
    half: Any = ao.PlaceholderObserver(dtype=torch.float16)
    assert spec_of(half, Role.WEIGHT).timing is Timing.WEIGHT_ONLY


def test_an_observer_without_dtype_is_refused() -> None:
    with pytest.raises(SpecError, match="Identity"):
        spec_of(nn.Identity)


@pytest.mark.parametrize(
    "make", [ao.MinMaxObserver, ao.HistogramObserver, ao.PerChannelMinMaxObserver.with_args(**SYMMETRIC)]
)
def test_qparams_are_those_of_the_module(make: Any) -> None:
    observation = ObservedBy.of(make())
    observation.update(X)
    assert observation.seen == X.numel()
    scale, zero_point = shown(make()).calculate_qparams()
    found = observation.qparams(spec_of(make()))
    assert torch.equal(found.scale.reshape(-1), scale)
    assert torch.equal(found.zero_point.reshape(-1), zero_point.long())


def test_what_was_found_goes_into_a_file_and_nothing_to_go_on_from() -> None:
    observation = ObservedBy.of(shown(ao.MinMaxObserver()))
    read = ObservedBy.from_state(observation.share, observation.to_state())
    spec = spec_of(ao.MinMaxObserver())
    assert read.seen == observation.seen == 1
    assert torch.equal(read.qparams(spec).scale, observation.qparams(spec).scale)
    with pytest.raises(ObservationError, match="file"):
        read.update(X)


def test_an_observer_that_saw_nothing_cannot_be_read() -> None:
    state = ObservedBy.of(ao.MinMaxObserver()).to_state()
    assert state == State({}, {"seen": 0})
    with pytest.raises(LoadError):
        ObservedBy.from_state(PerTensor(), state)
    with pytest.raises(ObservationError):
        ObservedBy.of(ao.MinMaxObserver()).qparams(spec_of(ao.MinMaxObserver()))


def test_only_one_of_two_that_are_merged_may_have_seen_data() -> None:
    seen, fresh = ObservedBy.of(shown(ao.MinMaxObserver())), ObservedBy.of(ao.MinMaxObserver())
    assert seen.merge(fresh) is seen
    assert fresh.merge(seen) is seen
    with pytest.raises(ObservationError, match="MinMaxObserver"):
        seen.merge(ObservedBy.of(shown(ao.MinMaxObserver())))


def test_a_module_cannot_be_named_in_a_spec() -> None:
    with pytest.raises(SpecError, match="module"):
        ObservedBy.empty(PerTensor(), {})
