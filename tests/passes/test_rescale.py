"""Scales fitted to what layers read: numbers by torch's own ops. The laws are in tests/recover."""

from __future__ import annotations

import pytest

import quantc as qc
from quantc.observe.trained import Trained
from quantc.passes.rescale import Rescale
from quantc.pipeline.pipeline import Pipeline
from quantc.spec.formats import DType, PerChannel, PerGroup
from quantc.spec.granularity import Share
from quantc.spec.spec import INT8_WEIGHT
from tests.support.recovery import linear_case, losses


@pytest.mark.parametrize("share", [PerChannel(axis=0), PerGroup(axis=1, size=8)], ids=str)
def test_scales_are_better_than_those_of_ranges(share: Share) -> None:
    case = linear_case(INT8_WEIGHT.but(dtype=DType.INT3, granularity=share), inputs=64)
    prepared = case.prepared()
    better = Pipeline((Rescale(),)).run(prepared.draft())
    (known,) = [each for each in better.plan.statistics.values() if isinstance(each, Trained)]
    assert known.share == share
    plain, fitted = (losses(prepared, qc.convert(each), case.batches[1::2])[0] for each in (prepared, better))
    assert float(fitted.sum()) < 0.9 * float(plain.sum())
    assert bool((fitted <= plain * 1.00001).all())


def test_text() -> None:
    assert str(Rescale()) == "rescale"
    assert str(Pipeline.parse("rescale{reduce-range=no}")) == "rescale{reduce-range=no}"
