"""Biases that take up the mean error: numbers by torch's own ops. The laws are in tests/recover."""

from __future__ import annotations

import torch

import quantc as qc
from quantc.passes.correct_bias import CorrectBias
from quantc.pipeline.pipeline import Pipeline
from tests.support.recovery import calls, linear_case, losses


def test_the_mean_of_the_output_is_that_of_the_float_layer() -> None:
    case = linear_case()
    prepared = case.prepared()
    better = Pipeline((CorrectBias(),)).run(prepared.draft())
    x = torch.cat(case.batches)

    def means(each: qc.Program) -> torch.Tensor:
        ((_, args, _),) = calls(each, case.batches[0])
        return torch.nn.functional.linear(x, *args[1:]).detach().mean(0)

    wanted, plain, fitted = (means(each) for each in (prepared, qc.convert(prepared), qc.convert(better)))
    assert float((fitted - wanted).abs().sum()) < 0.2 * float((plain - wanted).abs().sum())
    old, new = (losses(prepared, qc.convert(each), case.batches[1::2])[0] for each in (prepared, better))
    assert bool((new <= old * 1.00001).all())
    assert float(new.sum()) < float(old.sum())


def test_weights_are_not_touched() -> None:
    prepared = linear_case().prepared()
    better = Pipeline((CorrectBias(),)).run(prepared.draft())
    plain, fitted = (qc.convert(each).root.state_dict() for each in (prepared, better))
    changed = [name for name in plain if not torch.equal(plain[name], fitted[name])]
    assert len(changed) == 1
    assert "bias" in changed[0]


def test_text() -> None:
    assert str(CorrectBias()) == "correct-bias"
