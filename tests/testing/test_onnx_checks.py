"""Rules that claim ONNX, written so and run in ONNX Runtime, beside the Q/DQ form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from quantc.errors import QuantcError
from quantc.targets.onnx import onnx_module
from quantc.testing.onnx_checks import onnx_form
from quantc.testing.rule_trial import Trial
from tests.support.faulty_backends import GOOD
from tests.support.trials import good_trial, trials

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def claimed() -> Trial:
    """A rule that claims ONNX."""
    sigmoid = replace(GOOD.table["sigmoid"], supports=frozenset({"qdq", "onnx"}))
    return trials(replace(GOOD, modes={}, table=replace(GOOD.table, rules=(sigmoid,))), "sigmoid")[0]


def test_rules_that_do_not_claim_it_are_not_asked() -> None:
    assert onnx_form(good_trial("sigmoid")) is None


def test_a_rule_that_is_written_and_runs_is_right(claimed: Trial) -> None:
    assert onnx_form(claimed) == []


def changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = onnx_module.lower

    def lower(program: Any) -> Any:
        model = right(program)
        return lambda *args, **kwargs: change(model(*args, **kwargs))

    monkeypatch.setattr(onnx_module, "lower", lower)


def test_results_more_than_a_step_off_are_told(claimed: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_step(made: Tensor) -> Tensor:
        return made + 0.5 / 256

    def two_steps(made: Tensor) -> Tensor:
        return made + 2 / 256

    changed(monkeypatch, half_a_step)
    assert onnx_form(claimed) == []
    changed(monkeypatch, two_steps)
    faults = onnx_form(claimed)
    assert faults
    assert "output 0 is off by" in faults[0].what
    assert faults[0].where == "sigmoid"


def test_what_cannot_be_written_and_what_does_not_run_are_told_apart(
    claimed: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(program: Any) -> Any:
        raise QuantcError("no such op")

    monkeypatch.setattr(onnx_module, "lower", refuse)
    faults = onnx_form(claimed)
    assert faults
    (fault,) = faults
    assert "cannot be written: no such op" in fault.what

    def fail(made: Any) -> Any:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.undo()
    changed(monkeypatch, fail)
    faults = onnx_form(claimed)
    assert faults
    (fault,) = faults
    assert "does not run: RuntimeError: out of luck" in fault.what
    assert "and more" not in fault.what
