"""Statistics are monoids in bits: any order, any split, any number of threads, and through a file."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.observe.statistic_registry import STATISTICS
from quantc.spec.statistic import Permutation, Rotation, Scale, Statistic
from tests.support.laws import law
from tests.support.statistics import KINDS, Batch, batches, bits_of, statistic


@law(60)
@given(st.sampled_from(KINDS), batches(), st.integers(1, 8), st.randoms(use_true_random=False))
def test_any_order_and_any_split_give_the_same_bits(
    kind: str, data: list[Batch], shards: int, rng: random.Random
) -> None:
    whole = bits_of(statistic(kind, data))
    parts = [statistic(kind, data[index::shards]) for index in range(shards)]
    rng.shuffle(parts)
    before = [bits_of(part) for part in parts]
    merged = parts[0]
    for part in parts[1:]:
        merged = part.merge(merged) if rng.random() < 0.5 else merged.merge(part)
    assert bits_of(merged) == whole
    assert [bits_of(part) for part in parts] == before  # merging changes neither operand
    shuffled = list(data)
    rng.shuffle(shuffled)
    assert bits_of(statistic(kind, shuffled)) == whole


@law(40)
@given(st.sampled_from(KINDS), batches(), batches(), batches(), st.data())
def test_merging_is_associative_and_commutative(
    kind: str, a: list[Batch], b: list[Batch], c: list[Batch], data: st.DataObject
) -> None:
    width = a[0][1].shape
    alike = [[(n, torch.zeros(*x.shape)) for n, x in part if x.shape[::2] == width[::2]] for part in (b, c)]
    left, (middle, right) = statistic(kind, a), (statistic(kind, part) for part in alike)
    assert bits_of(left.merge(middle).merge(right)) == bits_of(left.merge(middle.merge(right)))
    assert bits_of(left.merge(middle)) == bits_of(middle.merge(left))
    assert bits_of(left.merge(statistic(kind, []))) == bits_of(statistic(kind, []).merge(left)) == bits_of(left)


@law(40)
@given(st.sampled_from(KINDS), batches())
def test_a_state_is_restored_with_the_same_bits(kind: str, data: list[Batch]) -> None:
    found = statistic(kind, data)
    assert bits_of(STATISTICS[kind].from_state(found.to_state())) == bits_of(found)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_matter(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [(n, torch.randn(1, 3000, 600, generator=generator) * 10**n) for n in range(3)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = bits_of(statistic(kind, data))
        torch.set_num_threads(4)
        assert bits_of(statistic(kind, data)) == alone
    finally:
        torch.set_num_threads(threads)


def close(ours: Statistic, theirs: Statistic) -> None:
    """The same but for the rounding to fixed point, which is relative to the largest value of a channel."""
    assert ours.seen == theirs.seen
    if not hasattr(ours, "matrix") or not ours.seen:
        return
    left, right = ours.matrix(), theirs.matrix()  # type: ignore[attr-defined]
    norms = right.diagonal(dim1=1, dim2=2).sqrt()
    error = (left - right).abs() / (norms.unsqueeze(1) * norms.unsqueeze(2)).clamp(min=1e-300)
    assert float(error.max()) < 1e-3


@law(60)
@given(st.sampled_from(["moments", "gram", "reservoir"]), batches(), st.randoms(use_true_random=False))
def test_carried_is_what_is_seen_again(kind: str, data: list[Batch], rng: random.Random) -> None:
    found, width = statistic(kind, data), data[0][1].shape[2]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    scale = 2.0 ** torch.randint(-6, 7, (width,), generator=generator)
    scaled = found.carried(Scale(scale))
    assert scaled is not None
    close(scaled, statistic(kind, [(n, x * scale) for n, x in data]))
    index = torch.randperm(width, generator=generator)
    permuted = found.carried(Permutation(index))
    if permuted is None:
        assert data[0][1].shape[0] > 1
    else:
        assert bits_of(permuted) == bits_of(statistic(kind, [(n, x[:, :, index]) for n, x in data]))


def test_carried_through_a_rotation() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(n, torch.randn(1, 64, 12, generator=generator)) for n in range(4)]
    turn, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    turned = [(n, (x.double() @ turn).float()) for n, x in data]
    for kind in ("gram", "reservoir"):
        carried = statistic(kind, data).carried(Rotation(turn))
        assert carried is not None
        close(carried, statistic(kind, turned))
    assert statistic("moments", data).carried(Rotation(turn)) is None  # it would take the products
