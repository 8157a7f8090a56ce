"""One model of one rule, taken through prepare, calibrate and convert."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.testing.rule_trial import (
    Fed,
    Standing,
    Subject,
    Trial,
    activations_of,
    quantizer_for,
    run,
    scale_inputs,
    sqnr,
    values_of,
)
from quantc.testing.synthesis import Model, models_of
from tests.support.faulty_backends import GOOD
from tests.support.trials import BY_NAME, good_trial


def test_sqnr_is_that_of_the_textbook() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator, dtype=torch.float64)
    noise = torch.randn(1000, generator=generator, dtype=torch.float64) / 100
    expected = 20 * torch.log10(x.norm() / noise.norm())
    assert sqnr([x], [x + noise]) == pytest.approx(float(expected))
    assert sqnr([x], [x]) == float("inf")


def test_a_taken_model_is_matched_and_has_its_operands_by_name() -> None:
    trial = good_trial("linear")
    assert trial.verdict.standing is Standing.TAKEN
    assert [(slot.name, slot.role) for slot in trial.slots] == [("x", "act"), ("w", "weight"), ("b", "bias")]
    assert trial.bits == 8
    assert trial.backend.table["linear"].roles["out"] == "act", "what is optional is asked for"


@pytest.mark.parametrize(
    ("name", "standing", "word"),
    [
        ("dead-rule", Standing.OTHER, "linear"),
        ("condition-that-refuses-all", Standing.REFUSED, "never wanted"),
        ("weight-that-is-computed", Standing.MISSED, "constant"),
    ],
)
def test_what_became_of_a_model_that_was_not_taken(name: str, standing: Standing, word: str) -> None:
    faulty = BY_NAME[name]
    subject = Subject(faulty.backend)
    rule = subject.demanded.table[faulty.rule]
    (_, model), *_ = models_of(rule, activations_of(subject.demanded, rule)).made
    verdict = Trial.of(subject, rule, model).verdict
    assert verdict.standing is standing
    assert word in verdict.reason


def test_a_model_that_holds_nothing_of_the_rule_is_missed() -> None:
    model = Model("given", qc.capture(nn.ReLU().eval(), (torch.randn(2, 3),)))
    subject = Subject(GOOD)
    verdict = Trial.of(subject, subject.demanded.table["tanh"], model).verdict
    assert verdict.standing is Standing.MISSED


def test_variants_of_a_backend_differ_in_outputs_alone() -> None:
    subject = Subject(GOOD)
    assert subject.demanded.table["linear"].roles["out"] == "act"
    assert "out" not in subject.without_outputs.table["linear"].roles
    assert subject.given.table["linear"].roles["out"] == "act?"
    assert subject.without_outputs.table["linear"].roles["w"] == "weight"


def test_operands_are_activations_unless_their_roles_are_those_of_weights() -> None:
    backend = Subject(GOOD).demanded
    assert activations_of(backend, backend.table["linear"]) == {"x", "out"}
    assert activations_of(backend, backend.table["max-pool"]) == {"x", "out"}


def test_rules_that_pass_on_what_they_are_given_are_fed_quantized_tensors() -> None:
    backend = Subject(GOOD).demanded
    assert isinstance(quantizer_for(backend, backend.table["max-pool"]), Fed)
    assert not isinstance(quantizer_for(backend, backend.table["add"]), Fed)
    assert good_trial("max-pool").verdict.standing is Standing.TAKEN


def test_inputs_are_scaled_where_they_are_floats() -> None:
    floats, whole, number = scale_inputs([torch.ones(2), torch.ones(2, dtype=torch.int64), 3], 0.5)
    assert floats.tolist() == [0.5, 0.5]
    assert whole.tolist() == [1, 1]
    assert number == 3


def test_values_within_a_program_are_seen() -> None:
    trial = good_trial("sigmoid")
    program = trial.prepared
    (made,) = values_of(program, [program.node("sigmoid")], trial.inputs)
    assert torch.equal(made, torch.sigmoid(trial.inputs[0]))
    assert torch.equal(run(program, trial.inputs)[0], made.double())


def test_sqnr_of_some_elements_alone() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    where = torch.tensor([True, False])
    assert sqnr([x], [y], [where]) == float("inf")
    assert sqnr([x], [y], [~where]) == pytest.approx(10 * 0.6020599913)
    assert sqnr([torch.zeros(1)], [torch.ones(1)]) == float("-inf")
