"""The numbers of quantize and dequantize ops, read from a converted program."""

from __future__ import annotations

from dataclasses import replace

import torch

from quantc.ir.site_index import operand_nodes
from quantc.testing.qdq_formats import Form, argument_names, forms, read_form, yielded_form
from tests.support.trials import good_trial


def test_operands_are_read_in_the_form_of_their_roles() -> None:
    trial = good_trial("linear")
    node = trial.converted.node("linear")
    x, w, b = (read_form(trial.converted, node, index) for index in range(3))
    assert x is not None
    assert w is not None
    assert b is not None
    assert (x.dtype, x.qmin, x.qmax, x.axis) == (torch.uint8, 0, 255, None)
    assert (w.dtype, w.qmin, w.qmax, w.axis) == (torch.int8, -128, 127, 0)
    assert w.scale.shape == w.zero_point.shape == (12,), "one for each output"
    assert b.dtype is torch.int32
    torch.testing.assert_close(b.scale.double(), x.scale.double() * w.scale.double())


def test_a_result_has_a_form_if_all_who_read_it_round_it() -> None:
    trial = good_trial("linear")
    linear = trial.converted.node("linear")
    found = yielded_form(trial.converted, linear)
    assert found is not None
    assert found.dtype is torch.uint8
    (placeholder,) = trial.converted.graph.find_nodes(op="placeholder")
    assert yielded_form(trial.converted, placeholder) is not None
    (output,) = trial.converted.graph.find_nodes(op="output")
    assert yielded_form(trial.converted, output) is None, "nobody reads it"


def test_what_is_read_as_float_has_no_form() -> None:
    trial = good_trial("linear")
    node = trial.prepared.node("linear")
    assert [read_form(trial.prepared, node, index) for index in range(3)] == [None] * 3
    assert yielded_form(trial.prepared, node) is None


def test_every_op_of_the_converted_program_is_listed_and_pairs_agree() -> None:
    program = good_trial("add").converted
    listed = list(forms(program))
    assert len(listed) == 6, "a quantize and a dequantize op for each of x, y and the sum"
    by_source = {operand_nodes(node)[0]: form for node, form in listed if "dequantize" in node.name}
    for node, form in listed:
        if node in by_source:
            assert form.equals(by_source[node])


def test_forms_differ_in_any_of_their_numbers() -> None:
    form = Form(torch.tensor(0.5), torch.tensor(3), None, 0, 255, torch.uint8)
    assert form.equals(replace(form, scale=torch.tensor(0.5)))
    for change in (
        {"scale": torch.tensor(0.25)},
        {"zero_point": torch.tensor(4)},
        {"axis": 0},
        {"qmin": 1},
        {"dtype": torch.int8},
    ):
        assert not form.equals(replace(form, **change))
    assert str(form) == "uint8 0..255 scale 0.5, zero point 3"
    assert str(replace(form, axis=1, scale=torch.ones(2))) == "uint8 0..255 along axis 1"


def test_operands_in_a_list_are_parts_of_one_argument() -> None:
    assert argument_names(good_trial("cat").prepared.node("cat")) == ("xs", "xs")
    assert argument_names(good_trial("linear").prepared.node("linear")) == ("x", "w", "b")
