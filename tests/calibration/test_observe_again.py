"""Ranges observed anew: those asked for, with the bits of a calibration."""

from __future__ import annotations

import pytest
import torch

from quantc.calibration.observe_again import observe_again
from quantc.errors import CalibrationError, QuantcError
from tests.support.spread_nets import collected, images, mobile

DATA = images(1, 3)


def test_some_ranges_are_replaced_and_others_left() -> None:
    program = collected(mobile(), DATA)
    before = dict(program.plan.statistics)
    first, second, *_ = before
    told = observe_again(program, images(5, 2), [first])
    assert told == "observed 1 ranges again, with 2 batches, where the others have seen 3 batches"
    assert program.plan.statistics[second] is before[second]
    assert observe_again(program, DATA, [first]) == "observed 1 ranges again, with 3 batches"
    mine, theirs = program.plan.statistics[first].to_state(), before[first].to_state()
    assert mine.values == theirs.values
    assert all(torch.equal(x, theirs.tensors[name]) for name, x in mine.tensors.items())


def test_no_batch_and_a_wrong_one_are_refused() -> None:
    program = collected(mobile(), DATA)
    (name, *_), before = program.plan.statistics, dict(program.plan.statistics)
    with pytest.raises(CalibrationError, match="no batches"):
        observe_again(program, [], [name])
    with pytest.raises(QuantcError, match=r"batch 1|does not fit"):
        observe_again(program, [DATA[0], torch.full_like(DATA[0], torch.nan)], [name])
    assert program.plan.statistics == before
