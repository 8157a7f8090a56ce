"""Accumulation by whole batches: what a failed batch has seen is dropped, and NaN is named where it appears."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, fx

from quantc.calibration.accumulator import FirstNotFinite, NotFiniteError, Seat, Tally
from quantc.calibration.interpreter import Runner
from quantc.observe import MinMax, MovingAverage, Observation
from quantc.spec.spec import UINT8
from tests.support.calibration import batch, captured, prepared
from tests.support.observations import bits_of, observed


def seen(totals: Mapping[str, Observation]) -> set[int]:
    return {total.seen for total in totals.values()}


def test_a_batch_counts_once_it_is_whole() -> None:
    program = prepared("minmax")
    tally = Tally(program, {})
    runner = Runner(program, tally.watchers())
    tally.begin()
    runner.run([batch(0)])
    assert seen(tally.whole.totals) == {0}
    before = tally.whole
    tally.commit(2)
    assert seen(before.totals) == {0}  # what somebody holds stays as it was
    assert (tally.whole.batches, tally.whole.samples) == (1, 2)
    assert tally.whole.totals["conv2d:in0"].seen == batch(0).numel()
    tally.begin()
    runner.run([batch(1) * 1000])
    tally.begin()  # dropped: the next batch starts over
    runner.run([batch(1)])
    tally.commit(2)
    expected = observed(UINT8.but(observe="minmax"), [batch(0), batch(1)])
    assert bits_of(tally.whole.totals["conv2d:in0"]) == bits_of(expected)


def test_samples_are_unknown_once_a_batch_does_not_say() -> None:
    tally = Tally(prepared("minmax"), {})
    for count, total in ((2, 2), (3, 5), (None, None), (4, None)):
        tally.begin()
        tally.commit(count)
        assert tally.whole.samples == total
    assert tally.whole.batches == 4


def test_statistics_that_are_there_are_added_to() -> None:
    spec = UINT8.but(observe="minmax")
    tally = Tally(prepared("minmax"), {"conv2d:in0": observed(spec, [torch.tensor([-77.0])])})
    tally.begin()
    tally.seats["conv2d:in0"].part.update(torch.tensor([5.0]))
    tally.commit(1)
    assert bits_of(tally.whole.totals["conv2d:in0"]) == bits_of(observed(spec, [torch.tensor([-77.0, 5.0])]))


def test_averages_go_on_in_a_copy() -> None:
    spec = UINT8.but(observe="moving-average{rate=0.5}")
    total = observed(spec, [torch.tensor([0.0, 4.0])])
    assert isinstance(total, MovingAverage)
    seat = Seat(spec)
    seat.begin(total)
    seat.part.update(torch.tensor([0.0, 8.0]))
    added = seat.added_to(total)
    assert isinstance(added, MovingAverage)
    assert (added.high, total.high) == (torch.tensor(6.0), torch.tensor(4.0))


def test_a_group_that_a_batch_did_not_reach_keeps_its_total() -> None:
    seat = Seat(UINT8)
    total = MinMax()
    seat.begin(total)
    assert seat.added_to(total) is total


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_is_named_with_its_node_and_count(bad: float) -> None:
    program = prepared("minmax")
    tally = Tally(program, {})
    tally.begin()
    x = batch(0).clone()
    x[0, 0, 0, 0] = bad
    with pytest.raises(NotFiniteError, match=f"1 of {x.numel()} values") as caught:
        Runner(program, tally.watchers()).run([x])
    assert caught.value.node.name == "x"
    assert "conv2d" in str(caught.value.advice)  # the op to leave float, were it a mask


def test_the_first_op_that_makes_one_is_found() -> None:
    program = captured()
    search = FirstNotFinite(program)
    assert search.run([batch(0)]) is None
    found = search.run([batch(0) * 3e38])
    assert isinstance(found, fx.Node)
    assert found.name == "x"  # infinite already
    large: Tensor = torch.full_like(batch(0), 3e38)
    made = search.run([large])
    assert made is not None
    assert made.name == "conv2d"
