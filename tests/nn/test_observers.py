"""The named choices of observers are torch's; and what the engine makes of an observer."""

from __future__ import annotations

import inspect
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import quantc.nn.fake_quantize as own_fakes
import quantc.nn.observers as own_observers
import quantc.nn.qconfig as own_qconfigs
from quantc.errors import ObservationError, SpecError
from quantc.flows.foreign_observers import ObservedBy, has_seen, spec_of
from quantc.nn.constructors import Constructor
from quantc.spec.formats import DType, PerChannel, PerTensor, Role, Scheme, Timing
from quantc.spec.observation import Observation
from tests.support.observer_cases import alike, ao, batches, named, observers, same


@pytest.mark.parametrize("name", named(own_observers, Constructor))
def test_the_named_observers_are_torch_s(name: str) -> None:
    alike(getattr(own_observers, name)(), getattr(ao.observer, name)())


@settings(max_examples=60)
@given(observers(), batches(), st.booleans())
def test_an_observation_by_a_module_gives_its_qparams(pair: tuple[Any, Any], data: list[Tensor], ours: bool) -> None:
    observer = pair[0] if ours else pair[1]
    if observer.qscheme == torch.per_channel_affine_float_qparams:
        return
    observation = ObservedBy.of(observer)
    assert isinstance(observation, Observation)
    spec = spec_of(observer)
    assert not has_seen(observer)
    with pytest.raises(ObservationError, match="nothing was observed"):
        observation.qparams(spec)
    for batch in data:
        observation.update(batch)
    found = observation.qparams(spec)
    same((found.scale.reshape(-1), found.zero_point.reshape(-1)), observer.calculate_qparams())
    again = ObservedBy.from_state(observation.share, observation.to_state())
    assert again.qparams(spec).equals(found)
    assert again.seen == observation.seen


def test_specs_of_observers() -> None:
    weight = spec_of(ao.default_per_channel_weight_observer, Role.WEIGHT)
    assert weight.granularity == PerChannel(axis=0)
    assert (weight.dtype, weight.scheme, weight.role) == (DType.INT8, Scheme.SYMMETRIC, Role.WEIGHT)
    act = spec_of(own_qconfigs.get_default_qconfig("x86").activation)
    assert (act.dtype, act.qmin, act.qmax, act.granularity) == (DType.UINT8, 0, 127, PerTensor())
    assert act.observe.name == "histogram"
    dynamic = spec_of(own_qconfigs.default_dynamic_qconfig.activation)
    assert dynamic.timing is Timing.DYNAMIC
    half = spec_of(own_qconfigs.float16_dynamic_qconfig.weight, Role.WEIGHT)
    assert (half.dtype, half.timing) == (DType.FP16, Timing.WEIGHT_ONLY)
    fixed = spec_of(own_observers.default_fixed_qparams_range_0to1_observer)
    assert str(fixed.observe) == "fixed{scale=0.00390625 zero_point=0}"
    fake = spec_of(own_fakes.default_weight_fake_quant, Role.WEIGHT)
    assert str(fake.observe) == "moving-average{rate=0.01}"
    with pytest.raises(SpecError):
        spec_of(nn.Identity)


def test_no_module_of_the_vocabulary_needs_torch_s_quantization() -> None:
    for module in (own_observers, own_fakes, own_qconfigs):
        assert "torch.ao" not in inspect.getsource(module)
