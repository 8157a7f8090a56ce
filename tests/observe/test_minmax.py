"""Minimum and maximum of the data, and the laws of merging that all observations follow."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.ao.quantization.observer import (
    MinMaxObserver,
)

from quantc.errors import DataError, ObservationError
from quantc.observe import (
    Observation,
    Statistics,
    start,
)
from quantc.spec.formats import PerChannel, PerGroup, PerTensor, PerToken
from quantc.spec.granularity import Share, as_rows, extremes, shared_shape
from quantc.spec.numerics import qparams_of
from quantc.spec.spec import INT8, UINT8, QuantSpec
from tests.support.observations import bits_of, observed
from tests.support.specs import families, tensors

SHAPE = (3, 4, 8)
SHARED: list[Share] = [PerTensor(), PerChannel(axis=1), PerChannel(axis=-1), PerGroup(axis=2, size=4), PerToken()]
FREE = ["minmax", "percentile", "mse", "entropy", "recording", "histogram", "l2norm"]


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


# -- what is refused -------------------------------------------------------------------------------------------


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
