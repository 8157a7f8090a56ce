"""`qc.convert`: the forms of a calibrated program, and what has to come before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import quantc as qc
from quantc.errors import CalibrationError, QuantcError
from quantc.ir.program import Program, Stage
from quantc.verbs.convert import FORMS, check_form, convert
from tests.support.store_files import calibrated, images, small_model


@pytest.fixture(scope="module")
def prepared() -> Program:
    return calibrated()


def test_the_prepared_program_can_be_calibrated_further_and_converted_again() -> None:
    prepared = calibrated()
    before = prepared.dump()
    first = convert(prepared)
    assert prepared.dump() == before
    assert convert(prepared).dump() == first.dump()
    qc.calibrate(prepared, [images(3) * 10])
    assert convert(prepared).dump() != first.dump()


def test_weights_are_stored_quantized(prepared: Program) -> None:
    quantized = convert(prepared)
    assert quantized.stage >= Stage.QUANTIZED
    kinds = {name: tensor.dtype for name, tensor in quantized.module.state_dict().items() if tensor.dim() > 1}
    assert set(kinds.values()) == {torch.int8}
    torch.testing.assert_close(quantized(images(1)), prepared(images(1)), atol=0.1, rtol=0)


@pytest.mark.parametrize("multiplier", ["float64", "fixed"])
def test_the_integer_form_is_the_same_function_in_either_style(prepared: Program, multiplier: Any) -> None:
    fused, plain = (convert(prepared, "integer", style=s, multiplier=multiplier) for s in ("fused", "decomposed"))
    assert [any("quantc" in str(node.target) for node in made.graph.nodes) for made in (fused, plain)] == [True, False]
    assert torch.equal(plain(images(2)), fused(images(2)))
    torch.testing.assert_close(plain(images(2)), convert(prepared)(images(2)), atol=0.05, rtol=0)


@pytest.mark.parametrize("choice", [{"multiplier": "fixed"}, {"style": "decomposed"}])
def test_choices_of_the_integer_form_are_refused_in_the_other(prepared: Program, choice: dict[str, Any]) -> None:
    with pytest.raises(QuantcError, match="integer") as caught:
        convert(prepared, **choice)
    assert 'to="integer"' in str(caught.value.advice)


def test_forms_are_known_by_name() -> None:
    for form in FORMS:
        check_form(form)
    with pytest.raises(QuantcError, match="interger") as caught:
        check_form("interger")
    assert "integer" in str(caught.value.advice)


def test_weights_alone_need_no_data() -> None:
    program = qc.capture(small_model(), (images(),))
    config = qc.QuantConfig().set(torch.nn.Linear, qc.INT8_WEIGHT_ONLY).set("conv", qc.FLOAT)
    quantized = convert(qc.prepare(program, "x86", config=config))
    assert any(tensor.dtype is torch.int8 for tensor in quantized.module.state_dict().values())


STAGES: dict[str, tuple[Callable[[], Any], type[QuantcError], str]] = {
    "captured": (lambda: qc.capture(small_model(), (images(),)), CalibrationError, "not prepared"),
    "prepared": (lambda: qc.prepare(qc.capture(small_model(), (images(),)), "x86"), CalibrationError, "not calibrated"),
    "converted": (lambda: convert(calibrated()), QuantcError, "already converted"),
    "a module": (small_model, QuantcError, "convert"),
}


@pytest.mark.parametrize("name", STAGES)
def test_what_is_too_early_or_too_late_is_refused(name: str) -> None:
    make, kind, word = STAGES[name]
    with pytest.raises(kind, match=word) as caught:
        convert(make())
    assert caught.value.advice
