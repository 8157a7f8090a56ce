"""The observers, fake quantizers and qconfigs of the flows, held against torch's own."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.ao.quantization
from hypothesis import given, settings
from torch import Tensor, nn

import quantc.flows.fake_quantize as own_fakes
import quantc.flows.observers as own_observers
import quantc.flows.qconfig as own_qconfigs
from quantc.errors import DataError, ObservationError, QuantcError, SpecError
from quantc.flows.foreign import ObservedBy, has_seen, spec_of
from quantc.nn.constructors import Constructor
from quantc.spec.formats import DType, PerChannel, PerTensor, Role, Scheme, Timing
from quantc.spec.observation import Observation

ao: Any = torch.ao.quantization
"""The oracle; its functions have no types."""

SCHEMES: dict[str, tuple[Any, ...]] = {
    "MinMaxObserver": (torch.per_tensor_affine, torch.per_tensor_symmetric),
    "MovingAverageMinMaxObserver": (torch.per_tensor_affine, torch.per_tensor_symmetric),
    "HistogramObserver": (torch.per_tensor_affine, torch.per_tensor_symmetric),
    "PerChannelMinMaxObserver": (
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    ),
    "MovingAveragePerChannelMinMaxObserver": (torch.per_channel_affine, torch.per_channel_symmetric),
}
RANGES: dict[torch.dtype, tuple[tuple[int | None, int | None], ...]] = {
    torch.quint8: ((None, None), (0, 127), (0, 255), (0, 15)),
    torch.uint8: ((None, None), (0, 255)),
    torch.qint8: ((None, None), (-127, 127), (-8, 7)),
    torch.int8: ((None, None), (-128, 127)),
}


@st.composite
def observers(draw: Any) -> tuple[Any, Any]:
    """An observer of ours and torch's of the same arguments."""
    name = draw(st.sampled_from(sorted(SCHEMES)))
    qscheme = draw(st.sampled_from(SCHEMES[name]))
    dtype = draw(st.sampled_from(sorted(RANGES, key=str)))
    low, high = draw(st.sampled_from(RANGES[dtype]))
    is_symmetric = qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    unsigned = dtype in (torch.quint8, torch.uint8)
    reduce_range = draw(st.booleans()) and not (is_symmetric and unsigned) and low is None
    keywords: dict[str, Any] = {"dtype": dtype, "qscheme": qscheme, "reduce_range": reduce_range}
    keywords |= {"quant_min": low, "quant_max": high, "eps": draw(st.sampled_from([2.0**-23, 2.0**-12]))}
    if "PerChannel" in name:
        keywords["ch_axis"] = draw(st.sampled_from([0, 1]))
    if name == "HistogramObserver":
        keywords["bins"] = draw(st.sampled_from([64, 2048]))
    return getattr(own_observers, name)(**keywords), getattr(ao, name)(**keywords)


@st.composite
def batches(draw: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = draw(st.integers(1, 4))
    size = draw(st.sampled_from([1e-6, 0.3, 1.0, 40.0]))
    shift = draw(st.sampled_from([-3.0, 0.0, 0.5]))
    kind = draw(st.sampled_from(["normal", "positive", "constant", "heavy"]))
    made = [torch.randn(3, 5, 7, generator=generator) * size * (1 + place) + shift for place in range(count)]
    if kind == "positive":
        return [x.relu() for x in made]
    if kind == "constant":
        return [torch.full_like(x, shift) for x in made]
    return [x * x * x for x in made] if kind == "heavy" else made


def same(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.double(), b.double()), (mine, theirs)


@settings(max_examples=250)
@given(observers(), batches())
def test_the_same_data_gives_the_bits_of_torch(pair: tuple[Any, Any], data: list[Tensor]) -> None:
    mine, theirs = pair
    for batch in data:
        assert mine(batch) is batch
        theirs(batch)
    same(mine.calculate_qparams(), theirs.calculate_qparams())


@settings(max_examples=60)
@given(observers(), batches())
def test_state_dicts_load_both_ways(pair: tuple[Any, Any], data: list[Tensor]) -> None:
    mine, theirs = pair
    for batch in data:
        mine(batch)
    empty_of_torch = copy.deepcopy(theirs)
    empty_of_torch.load_state_dict(mine.state_dict())
    same(mine.calculate_qparams(), empty_of_torch.calculate_qparams())
    fresh = copy.deepcopy(pair[0])
    fresh.reset_min_max_vals()
    assert not fresh.has_seen
    for batch in data:
        theirs(batch)
    fresh.load_state_dict(theirs.state_dict())
    same(fresh.calculate_qparams(), theirs.calculate_qparams())


def test_a_long_calibration_of_a_histogram_is_torch_s() -> None:
    torch.manual_seed(0)
    mine, theirs = own_observers.HistogramObserver(reduce_range=True), ao.HistogramObserver(reduce_range=True)
    for place in range(12):
        x = torch.randn(4, 16, 9, 9) * (0.5 + 0.2 * place) + torch.rand(1)
        mine(x)
        theirs(x)
    assert torch.equal(mine.histogram, theirs.histogram)
    same(mine.calculate_qparams(), theirs.calculate_qparams())


def named(module: Any, kind: type) -> list[str]:
    return sorted(name for name, value in vars(module).items() if isinstance(value, kind) and not name.startswith("_"))


ATTRIBUTES = ("dtype", "qscheme", "quant_min", "quant_max", "reduce_range", "is_dynamic", "averaging_constant")


def alike(mine: Any, theirs: Any) -> None:
    assert type(mine).__name__ == type(theirs).__name__
    for name in ATTRIBUTES:
        assert getattr(mine, name, None) == getattr(theirs, name, None), name
    assert hasattr(mine, "eps") >= hasattr(theirs, "eps")
    if hasattr(theirs, "eps"):
        assert float(mine.eps) == float(theirs.eps)
    if hasattr(theirs, "scale"):
        same((mine.scale, mine.zero_point), (theirs.scale, theirs.zero_point))
    if getattr(theirs, "ch_axis", None) is not None and "PerChannel" in type(theirs).__name__:
        assert mine.ch_axis == theirs.ch_axis
    if hasattr(theirs, "activation_post_process"):
        assert mine.ch_axis == theirs.ch_axis
        alike(mine.activation_post_process, theirs.activation_post_process)


@pytest.mark.parametrize("name", named(own_observers, Constructor))
def test_the_named_observers_are_torch_s(name: str) -> None:
    alike(getattr(own_observers, name)(), getattr(ao.observer, name)())


@pytest.mark.parametrize("name", named(own_fakes, Constructor))
def test_the_named_fake_quantizers_are_torch_s(name: str) -> None:
    alike(getattr(own_fakes, name)(), getattr(ao.fake_quantize, name)())


def qconfigs() -> dict[str, tuple[Any, Any]]:
    found = {name: (getattr(own_qconfigs, name), getattr(ao.qconfig, name)) for name in named(own_qconfigs, tuple)}
    for backend in own_qconfigs.ENGINES:
        found[f"{backend}"] = own_qconfigs.get_default_qconfig(backend), ao.get_default_qconfig(backend)
        for version in (0, 1):
            found[f"{backend}-qat-{version}"] = (
                own_qconfigs.get_default_qat_qconfig(backend, version),
                ao.get_default_qat_qconfig(backend, version),
            )
    return found


QCONFIGS = qconfigs()


def test_every_named_qconfig_of_torch_is_here() -> None:
    theirs = {name for name, value in vars(ao.qconfig).items() if isinstance(value, ao.QConfig) and name[0] != "_"}
    assert theirs == set(named(own_qconfigs, tuple))


@pytest.mark.parametrize("name", QCONFIGS)
def test_qconfigs_are_torch_s(name: str) -> None:
    mine, theirs = QCONFIGS[name]
    for role in ("activation", "weight"):
        made, upstream = getattr(mine, role)(), getattr(theirs, role)()
        if isinstance(upstream, nn.Identity):
            assert isinstance(made, nn.Identity)
        else:
            alike(made, upstream)


FAKES = ["FakeQuantize", "FusedMovingAvgObsFakeQuantize"]


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("by_channel", [False, True])
def test_fake_quantizers_compute_and_learn_what_torch_s_do(name: str, by_channel: bool) -> None:
    torch.manual_seed(3)
    observer = "MovingAveragePerChannelMinMaxObserver" if by_channel else "MovingAverageMinMaxObserver"
    scheme = torch.per_channel_symmetric if by_channel else torch.per_tensor_affine
    ends = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": scheme}
    mine = getattr(own_fakes, name)(observer=getattr(own_observers, observer), **ends)
    theirs = getattr(ao, name)(observer=getattr(ao, observer), **ends)
    for step in range(4):
        x = torch.randn(4, 6) * (1 + step)
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        if step == 3:
            mine.disable_observer()
            theirs.disable_observer()
        out, expected = mine(left), theirs(right)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad)
    x = torch.randn(4, 6)
    same(mine.calculate_qparams(), theirs.calculate_qparams())
    fresh = getattr(own_fakes, name)(observer=getattr(own_observers, observer), **ends)
    fresh.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    assert torch.equal(fresh.eval()(x), theirs.eval()(x))


def test_switches_reach_every_fake_quantizer_of_a_model() -> None:
    first = own_fakes.default_fake_quant()
    model = nn.Sequential(first, nn.ReLU(), own_fakes.default_fused_act_fake_quant())
    model.apply(own_fakes.disable_fake_quant)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), x.relu())
    model.apply(own_fakes.enable_fake_quant)
    model.apply(own_fakes.disable_observer)
    before = first.scale.clone()
    model(x * 100)
    assert torch.equal(first.scale, before)


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_nan_is_refused_where_it_is_seen(name: str) -> None:
    observer = getattr(own_observers, name)()
    with pytest.raises(DataError, match="NaN"):
        observer(torch.tensor([[1.0, torch.nan]]))


def test_infinity_is_left_out_of_histograms_and_said() -> None:
    observer = own_observers.HistogramObserver()
    with pytest.warns(UserWarning, match="infinite"):
        observer(torch.tensor([0.0, 1.0, torch.inf]))
    assert float(observer.max_val) == 1.0


def test_scales_of_nothing_are_warned_of() -> None:
    with pytest.warns(own_observers.UnobservedWarning, match="has seen no data"):
        scale, zero_point = own_observers.MinMaxObserver().calculate_qparams()
    assert (float(scale), int(zero_point)) == (1.0, 0)


@pytest.mark.parametrize(
    ("make", "keywords"),
    [
        (own_observers.MinMaxObserver, {"qscheme": torch.per_channel_affine}),
        (own_observers.PerChannelMinMaxObserver, {"qscheme": torch.per_tensor_affine}),
        (own_observers.PerChannelMinMaxObserver, {"is_dynamic": True}),
        (own_observers.HistogramObserver, {"is_dynamic": True}),
        (own_observers.MovingAverageMinMaxObserver, {"is_dynamic": True}),
        (own_observers.MinMaxObserver, {"dtype": torch.float64}),
        (own_observers.MinMaxObserver, {"quant_min": 3, "quant_max": 9}),
        (own_observers.MinMaxObserver, {"qscheme": torch.per_tensor_symmetric, "reduce_range": True}),
        (own_fakes.FakeQuantize, {"quant_min": -4, "quant_max": 300}),
        (own_fakes.FusedMovingAvgObsFakeQuantize, {"observer": own_observers.MinMaxObserver}),
        (own_fakes.FixedQParamsFakeQuantize, {"observer": own_observers.MinMaxObserver}),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        make(**keywords)


def test_a_qconfig_of_observers_is_refused() -> None:
    with pytest.raises(ValueError, match="all layers would share it") as caught:
        own_qconfigs.QConfig(own_observers.MinMaxObserver(), own_observers.MinMaxObserver)
    assert isinstance(caught.value, QuantcError)
    with pytest.raises(QuantcError, match="did you mean fbgemm"):
        own_qconfigs.get_default_qconfig("fbgem")


# -- constructors ----------------------------------------------------------------------------------------------


def test_constructors_compare_and_print_and_later_arguments_win() -> None:
    make = own_observers.MinMaxObserver.with_args
    assert make(dtype=torch.qint8) == make(dtype=torch.qint8)
    assert make(dtype=torch.qint8) != make(dtype=torch.quint8)
    assert len({make(dtype=torch.qint8), make(dtype=torch.qint8)}) == 1
    assert make(quant_min=0).with_args(quant_max=15, dtype=torch.quint8)().quant_max == 15
    assert repr(make(dtype=torch.qint8)) == "MinMaxObserver(dtype=torch.qint8)"
    counted = iter(range(10))
    later = own_observers.RecordingObserver.with_callable_args(dtype=lambda: next(counted))
    assert [later().dtype, later().dtype] == [0, 1]


def test_no_module_of_the_vocabulary_needs_torch_s_quantization() -> None:
    for module in (own_observers, own_fakes, own_qconfigs):
        assert "torch.ao" not in inspect.getsource(module)


# -- as the engine sees them -----------------------------------------------------------------------------------


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
