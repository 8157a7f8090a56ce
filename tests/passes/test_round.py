"""Rounding that follows the data: numbers by torch's own ops. The laws are in tests/recover."""

from __future__ import annotations

import pytest

import quantc as qc
from quantc.passes.round import Round
from quantc.pipeline.pipeline import Pipeline
from tests.support.recovery import linear_case, losses


@pytest.mark.parametrize("method", ["gptq", "coordinate"])
def test_most_of_the_loss_is_recovered(method: str) -> None:
    case = linear_case(inputs=64)
    prepared = case.prepared()
    better = Pipeline.parse(f"round{{method={method}}}").run(prepared.draft())
    plain, fitted = (losses(prepared, qc.convert(each), case.batches[1::2])[0] for each in (prepared, better))
    assert float(fitted.sum()) < 0.5 * float(plain.sum())
    assert bool((fitted <= plain * 1.00001).all())


def test_the_weights_are_levels_of_their_scales() -> None:
    case = linear_case()
    better = Pipeline((Round(),)).run(case.prepared())
    weights = {name: x for name, x in qc.convert(better).root.state_dict().items() if x.dtype.itemsize == 1}
    (levels,) = weights.values()
    assert int(levels.min()) >= -8
    assert int(levels.max()) <= 7


def test_biases_stay_where_they_are_to_be_kept() -> None:
    for bias, count in (("kept", 1), ("free", 2)):
        better = Pipeline.parse(f"round{{bias={bias}}}").run(linear_case().prepared())
        assert len(better.plan.fitted) == count


def test_text() -> None:
    assert str(Round()) == "round"
    assert str(Pipeline.parse("round{method=coordinate bias=kept}")) == "round{method=coordinate bias=kept}"
