"""Observations: the laws of merging, what each one sees, and how they agree with torch's observers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.ao.quantization.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)

from quantc.errors import DataError, ObservationError, PluginError, SpecError
from quantc.flows.foreign import ObservedBy
from quantc.observe import (
    OBSERVATIONS,
    Histogram,
    MinMax,
    MovingAverage,
    Observation,
    Order,
    State,
    Statistics,
    register_observation,
    start,
)
from quantc.observe.buckets import HALF, bucket_of, edges
from quantc.observe.trained import Trained
from quantc.spec.formats import PerChannel, PerGroup, PerTensor, PerToken
from quantc.spec.granularity import Share, as_rows, extremes, shared_shape
from quantc.spec.numerics import QParams, qparams_of
from quantc.spec.spec import INT8, INT8_WEIGHT, UINT8, QuantSpec
from tests.support.specs import families, tensors

SHAPE = (3, 4, 8)
SHARED: list[Share] = [PerTensor(), PerChannel(axis=1), PerChannel(axis=-1), PerGroup(axis=2, size=4), PerToken()]
FREE = ["minmax", "percentile", "mse", "entropy", "recording", "histogram", "l2norm"]


def observed(spec: QuantSpec, batches: list[Tensor]) -> Observation:
    observation = start(spec)
    for batch in batches:
        observation.update(batch)
    return observation


def bits_of(observation: Observation) -> dict[str, object]:
    """All it holds, in a form in which -0.0 is not 0.0."""
    state = observation.to_state()
    tensors = {name: x.view(torch.int32) if x.dtype == torch.float32 else x for name, x in state.tensors.items()}
    return {**{name: (str(x.dtype), x.tolist()) for name, x in tensors.items()}, **state.values}


def merged(spec: QuantSpec, parts: list[Observation]) -> Observation:
    total = start(spec)
    for part in parts:
        total = total.merge(part)
    return total


@settings(max_examples=60)
@given(
    st.sampled_from(["minmax", "percentile", "mse"]),
    st.sampled_from(SHARED),
    st.lists(tensors(SHAPE), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_any_split_and_order_gives_the_same_bits(
    name: str, share: Share, batches: list[Tensor], random: object
) -> None:
    spec = INT8.but(observe=name, granularity=share)
    whole = observed(spec, batches)
    shuffled = list(batches)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    at = len(shuffled) // 2
    split = observed(spec, shuffled[:at]).merge(observed(spec, shuffled[at:]))
    assert bits_of(split) == bits_of(whole)
    assert split.qparams(spec).equals(whole.qparams(spec))


@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_the_sign_of_zero_leaves_no_trace_of_the_order(name: str) -> None:
    spec, zeros = INT8.but(observe=name), [torch.tensor([-0.0]), torch.tensor([0.0])]
    assert bits_of(observed(spec, zeros)) == bits_of(observed(spec, zeros[::-1]))


@settings(max_examples=40)
@given(st.sampled_from(["minmax", "mse"]), st.sampled_from(SHARED), st.lists(tensors(SHAPE), min_size=3, max_size=3))
def test_merging_is_associative_and_commutative_and_empty_changes_nothing(
    name: str, share: Share, batches: list[Tensor]
) -> None:
    spec = INT8.but(observe=name, granularity=share)
    a, b, c = (observed(spec, [batch]) for batch in batches)
    before = bits_of(a)
    assert bits_of(a.merge(b).merge(c)) == bits_of(a.merge(b.merge(c)))
    assert bits_of(a.merge(b)) == bits_of(b.merge(a))
    assert bits_of(a.merge(start(spec))) == bits_of(start(spec).merge(a)) == before
    assert bits_of(a) == before


@pytest.mark.parametrize(
    ("name", "share"),
    [*((name, PerTensor()) for name in FREE), *((name, share) for name in ("minmax", "mse") for share in SHARED[1:])],
    ids=str,
)
def test_a_restart_in_the_middle_gives_the_same_bits(name: str, share: Share, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(*SHAPE, generator=generator) * 10.0**n for n in range(-3, 3)]
    spec = UINT8.but(observe=name, granularity=share)
    whole = observed(spec, batches)
    Statistics({"relu:out0": observed(spec, batches[:2])}).save(tmp_path / "half.safetensors")
    resumed = Statistics.load(tmp_path / "half.safetensors").sites["relu:out0"]
    for batch in batches[2:]:
        resumed.update(batch)
    shards = merged(spec, [observed(spec, [batch]) for batch in reversed(batches)])
    assert resumed.qparams(spec).equals(whole.qparams(spec))
    assert shards.qparams(spec).equals(whole.qparams(spec))
    if name != "recording":
        assert bits_of(resumed) == bits_of(whole) == bits_of(shards)


def test_min_max_over_batches_is_torchs_observer() -> None:
    for seed in range(50):
        ours, theirs = start(UINT8), MinMaxObserver(eps=2**-12)
        for x in families(torch.Generator().manual_seed(seed), 8, 33):
            ours.update(x)
            theirs(x)
        scale, zero_point = theirs.calculate_qparams()
        assert ours.qparams(UINT8).one == (scale.item(), zero_point.item())


@pytest.mark.parametrize("share", SHARED, ids=str)
def test_min_max_of_one_tensor_is_what_a_weight_would_get(share: Share) -> None:
    x = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(2))
    spec = INT8.but(granularity=share)
    assert observed(spec, [x]).qparams(spec).equals(qparams_of(x, spec))
    low, high = extremes(x, share)
    rows = as_rows(x, share)
    assert low.shape == shared_shape(x.shape, share)
    assert torch.equal(rows.amin(1), low.reshape(-1))
    assert torch.equal(rows.amax(1), high.reshape(-1))


def test_moving_average_is_torchs() -> None:
    generator = torch.Generator().manual_seed(3)
    spec = UINT8.but(observe="moving-average{rate=0.1}")
    channels = INT8_WEIGHT.but(observe="moving-average", role="act")
    ours, ours_channels = start(spec), start(channels)
    theirs = MovingAverageMinMaxObserver(averaging_constant=0.1, eps=spec.eps)
    theirs_channels = MovingAveragePerChannelMinMaxObserver(
        dtype=torch.int8, qscheme=torch.per_channel_symmetric, eps=channels.eps
    )
    for _ in range(20):
        x = torch.randn(5, 7, generator=generator)
        for observer in (theirs, theirs_channels):
            observer(x)
        ours.update(x)
        ours_channels.update(x)
    scale, zero_point = theirs.calculate_qparams()
    assert ours.qparams(spec).one == (scale.item(), zero_point.item())
    assert torch.equal(ours_channels.qparams(channels).scale, theirs_channels.calculate_qparams()[0])


def test_moving_average_says_that_order_matters_and_is_refused_when_merged(tmp_path: Path) -> None:
    spec = INT8.but(observe="moving-average")
    one, other = observed(spec, [torch.ones(3)]), observed(spec, [torch.zeros(3)])
    assert MovingAverage.order is Order.MATTERS
    with pytest.raises(ObservationError, match="depend on the order of the data") as caught:
        one.merge(other)
    assert caught.value.advice is not None
    assert "one process" in caught.value.advice
    with pytest.raises(ObservationError) as named:
        Statistics({"relu:out0": one}).merge(Statistics({"relu:out0": other}))
    assert named.value.where == "relu:out0"
    assert bits_of(one.merge(start(spec))) == bits_of(start(spec).merge(one)) == bits_of(one)
    Statistics({"relu:out0": one}).save(tmp_path / "s.safetensors")
    assert bits_of(Statistics.load(tmp_path / "s.safetensors").sites["relu:out0"]) == bits_of(one)


# -- the histogram ---------------------------------------------------------------------------------------------


def test_every_float_lies_between_the_edges_of_its_bucket() -> None:
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[torch.isfinite(x)]
    buckets = bucket_of(x).numpy()
    magnitude = x.double().abs().numpy()
    index = buckets % HALF
    assert ((buckets >= HALF) == ~x.signbit().numpy()).all()
    assert (edges()[index] <= magnitude).all()
    assert (magnitude < edges()[index + 1]).all()
    normal = index >= 64
    assert (edges()[index + 1][normal] <= edges()[index][normal] * (1 + 1 / 64)).all()


@given(tensors((40,)))
def test_the_histogram_counts_every_element_once(x: Tensor) -> None:
    histogram = Histogram()
    histogram.update(x)
    assert histogram.counts is not None
    assert histogram.columns is not None
    assert int(histogram.counts.sum()) == histogram.seen == x.numel()
    expected = Counter(bucket_of(x).tolist())
    assert dict(zip(histogram.columns.tolist(), histogram.counts[0].tolist(), strict=True)) == expected
    cells = histogram.cells()[0]
    assert (cells.low, cells.high) == (float(x.min()) + 0.0, float(x.max()) + 0.0)


def test_memory_layout_does_not_matter() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(5))
    forms = [x, x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2), x[:, :, ::2].repeat(1, 1, 1, 1)]
    first, *others = (bits_of(observed(INT8.but(observe="mse"), [form])) for form in forms[:3])
    assert all(other == first for other in others)
    assert observed(INT8.but(observe="mse"), [forms[3]]).seen == forms[3].numel()


@pytest.mark.parametrize("name", ["minmax", "mse", "moving-average", "recording"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_counted_and_refused_by_name(name: str, bad: float) -> None:
    spec = INT8.but(observe=name)
    observation = observed(spec, [torch.ones(5), torch.tensor([1.0, bad, bad])])
    assert (observation.seen, observation.non_finite) == (8, 2)
    with pytest.raises(DataError, match="2 of 8 observed values are NaN or infinite") as caught:
        observation.qparams(spec, where="softmax:out0")
    assert caught.value.where == "softmax:out0"
    assert caught.value.advice


@pytest.mark.parametrize("name", ["minmax", "mse", "moving-average", "recording"])
def test_no_data_gives_no_range(name: str) -> None:
    spec = INT8.but(observe=name)
    observation = observed(spec, [torch.zeros(0)])
    with pytest.raises(ObservationError, match="nothing was observed") as caught:
        observation.qparams(spec, where="relu:out0")
    assert caught.value.where == "relu:out0"


def test_integers_and_changing_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"torch.int64 was to be observed"):
        start(INT8).update(torch.ones(3, dtype=torch.int64))
    channels = start(INT8.but(granularity=PerChannel(axis=0)))
    channels.update(torch.ones(3, 2))
    with pytest.raises(DataError, match=r"ranges of shape \[3\] were collected"):
        channels.update(torch.ones(4, 2), where="add:out0")


def test_half_precision_is_read_as_float32() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(6)).bfloat16()
    for name in ("minmax", "mse"):
        spec = INT8.but(observe=name)
        assert bits_of(observed(spec, [x])) == bits_of(observed(spec, [x.float()]))


def test_statistics_of_another_sharing_are_refused() -> None:
    tensor, channel = (
        observed(INT8, [torch.ones(2, 2)]),
        observed(INT8.but(granularity="per-channel"), [torch.ones(2, 2)]),
    )
    with pytest.raises(ObservationError, match=r"per-tensor cannot be merged with minmax per-channel"):
        tensor.merge(channel)
    with pytest.raises(ObservationError, match="the spec asks for per-tensor"):
        channel.qparams(INT8)
    with pytest.raises(ObservationError, match="a histogram gives no recording range"):
        observed(INT8.but(observe="mse"), [torch.ones(2)]).qparams(INT8.but(observe="recording"))


# -- the others ------------------------------------------------------------------------------------------------


def test_recordings_keep_the_tensors() -> None:
    spec = INT8.but(observe="recording")
    x = torch.randn(4)
    recording = observed(spec, [x, x + 1])
    x.zero_()
    kept = recording.to_state().tensors
    assert len(kept) == 2
    assert torch.equal(kept["0"] + 1, kept["1"])


def test_nothing_keeps_nothing() -> None:
    spec = INT8.but(observe="none")
    nothing = observed(spec, [torch.ones(3)]).merge(observed(spec, [torch.ones(4)]))
    assert nothing.seen == 7
    with pytest.raises(ObservationError, match="keeps no statistics"):
        nothing.qparams(spec)


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


@dataclass(eq=False)
class Largest:
    """A user's own: symmetric around the largest magnitude, times a margin."""

    statistics: ClassVar[str] = "largest"
    order: ClassVar[Order] = Order.FREE

    margin: float
    share: Share = field(default_factory=PerTensor)
    largest: float = 0.0
    seen: int = 0
    non_finite: int = 0

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, bool | int | float | str]) -> Self:
        return cls(float(options.get("margin", 1.0)), share)

    def update(self, x: Tensor, *, where: str = "") -> None:
        self.seen += x.numel()
        self.largest = max(self.largest, float(x.abs().max()))

    def merge(self, other: Self) -> Self:
        return type(self)(self.margin, self.share, max(self.largest, other.largest), self.seen + other.seen)

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        return QParams(torch.tensor(self.largest * self.margin / spec.qmax), torch.tensor(0))

    def to_state(self) -> State:
        return State({}, {"largest": self.largest, "seen": self.seen, "margin": self.margin})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        return cls(state.number("margin"), share, state.number("largest"), state.count("seen"))


def test_anybody_can_write_one(tmp_path: Path) -> None:
    register_observation(Largest)
    try:
        spec = INT8.but(observe="largest{margin=2.0}")
        observation = observed(spec, [torch.tensor([1.0, -127.0])])
        assert observation.qparams(spec).one == (2.0, 0)
        Statistics({"x:out0": observation}).save(tmp_path / "s.safetensors")
        assert Statistics.load(tmp_path / "s.safetensors").sites["x:out0"].qparams(spec).one == (2.0, 0)
    finally:
        OBSERVATIONS.forget("largest")
    with pytest.raises(SpecError, match="there is no observation 'largest'"):
        QuantSpec.parse('int8{observe="largest{margin=3.0}"}')


def test_what_is_no_observation_cannot_be_registered() -> None:
    with pytest.raises(PluginError, match="it lacks empty, update, merge"):
        register_observation(int)  # type: ignore[arg-type]


def observed_by_a_module() -> Observation:
    found = ObservedBy.of(MinMaxObserver())  # anybody's serves
    found.update(torch.tensor([-1.0, 2.0]))
    return found


MADE_ELSEWHERE: dict[type[Observation], Callable[[], Observation]] = {
    Trained: lambda: Trained(PerTensor(), QParams(torch.tensor(0.5), torch.tensor(3))),
    ObservedBy: observed_by_a_module,
}
"""What no spec can ask for: training and the flows make it, and a file brings it back."""


@pytest.mark.parametrize("name", OBSERVATIONS.names())
def test_all_that_are_offered_follow_the_protocol(name: str) -> None:
    kind = OBSERVATIONS[name]
    options: dict[str, bool | int | float | str] = {"scale": 0.5} if name == "fixed" else {}
    if kind in MADE_ELSEWHERE:
        found = MADE_ELSEWHERE[kind]()
        again = kind.from_state(found.share, found.to_state())
        assert again.qparams(UINT8).equals(found.qparams(UINT8))
        with pytest.raises(SpecError, match=r"training|observer module"):
            kind.empty(PerTensor(), options)
    else:
        found = kind.empty(PerTensor(), options)
    assert isinstance(found, Observation)
    assert MinMax.statistics in OBSERVATIONS
    assert kind.statistics in OBSERVATIONS
