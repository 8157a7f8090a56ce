"""quantize: scales from what was seen and from weights, by hand; and who reads which form of a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from quantc.annotate.quantizer import quantizer_of
from quantc.errors import CalibrationError
from quantc.ir.decisions import Quantize
from quantc.ir.program import Program
from quantc.passes.annotate import Annotate
from quantc.passes.insert_observers import InsertObservers
from quantc.passes.quantize import QuantizePass
from quantc.passes.share import Share
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.spec.spec import INT8_WEIGHT, UINT8
from tests.support.small_backend import SMALL
from tests.support.text_programs import inputs_of, program_of, see

BACKEND = SMALL.but(act=UINT8.but(observe="minmax"), weight=INT8_WEIGHT.but(qmin=-127))
LINEAR = """program "Head" stage=canonical method=export mode=eval
  input %x : f32[4,3]
  const %w = "w" : f32[5,3] param
  %head : f32[4,5] = linear(%x, %w)
  output (%head,)
"""
TWO = """program "Two" stage=canonical method=export mode=eval
  input %x : f32[4,3]
  const %w = "w" : f32[3,3] buffer
  %one : f32[4,3] = linear(%x, %w)
  %exp : f32[4,3] = exp(%x)
  %two : f32[4,3] = add(%one, %exp)
  output (%two,)
"""


def prepared(text: str) -> Program:
    return Pipeline((Annotate(backend=quantizer_of(BACKEND)), Share())).run(program_of(text))


def calibrated(text: str) -> Program:
    program = prepared(text)
    see(program)
    return program


def quantizes(program: Program, source: str) -> list[fx.Node]:
    return [user for user in program.node(source).users if is_quantize(user)]


def test_the_range_of_an_activation_is_what_was_seen_with_zero_in_it() -> None:
    program = calibrated(LINEAR)
    (x,) = inputs_of(program)
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    QuantizePass().run(program)
    (node,) = quantizes(program, "x")
    _, scale, zero_point, qmin, qmax, dtype = node.args
    assert (qmin, qmax, dtype) == (0, 255, torch.uint8)
    assert scale == pytest.approx((high - low) / 255, rel=1e-6)
    assert zero_point == round(-low / (high - low) * 255)


def test_a_weight_has_a_scale_for_each_output() -> None:
    program = calibrated(LINEAR)
    weight = program.tensor(program.node("w"))
    assert weight is not None
    QuantizePass().run(program)
    (node,) = quantizes(program, "w")
    scale, zero_point = (program.tensor(operand) for operand in node.all_input_nodes[1:])
    assert isinstance(scale, Tensor)
    assert isinstance(zero_point, Tensor)
    assert torch.allclose(scale, weight.abs().amax(1) / 127, rtol=1e-6)
    assert not zero_point.any()
    assert node.args[3] == 0


def test_the_program_computes_what_torch_does_on_rounded_tensors() -> None:
    program = calibrated(LINEAR)
    (x,), weight = inputs_of(program), program.tensor(program.node("w"))
    assert weight is not None
    QuantizePass().run(program)
    qparams = program.plan.qparams
    rounded = [
        torch.fake_quantize_per_tensor_affine(x, float(found.scale), int(found.zero_point), 0, 255)
        for found in (qparams["head:in0"],)
    ]
    columns = torch.fake_quantize_per_channel_affine(
        weight, qparams["head:in1"].scale, torch.zeros(5, dtype=torch.int32), 0, -127, 127
    )
    result = torch.nn.functional.linear(rounded[0], columns)
    out = qparams["head:out0"]
    expected = torch.fake_quantize_per_tensor_affine(result, float(out.scale), int(out.zero_point), 0, 255)
    assert torch.allclose(program(x), expected, rtol=0, atol=float(out.scale) * 1e-3)


def test_a_tensor_that_one_reader_wants_quantized_is_float_for_the_other() -> None:
    program = calibrated(TWO)
    QuantizePass().run(program)
    assert program.node("exp").args[0] is program.node("x")
    assert is_dequantize(program.node("one").all_input_nodes[0])
    readers = program.node("one").users
    assert [is_quantize(user) for user in readers] == [True], "what its op yields quantized is so for everyone"


def test_a_reader_that_wants_another_form_gets_it_requantized() -> None:
    program = Pipeline((Annotate(backend=quantizer_of(BACKEND)),)).run(program_of(TWO))
    site = next(site for site in program.plan.outcomes if str(site) == "two:in0")
    program.plan.outcomes[site] = Quantize(UINT8.but(qmax=127, observe="minmax"))
    see(Pipeline((Share(),)).run(program))
    QuantizePass().run(program)
    operand = program.node("two").all_input_nodes[0]
    (again,) = operand.all_input_nodes
    assert is_quantize(again)
    assert again.args[4] == 127
    (source,) = again.all_input_nodes
    assert is_dequantize(source)
    assert source.args[4] == 255


def test_observers_go_and_the_way_back_to_training_is_closed() -> None:
    program = prepared(LINEAR)
    InsertObservers().run(program)
    program.module(*inputs_of(program))
    plain = calibrated(LINEAR)
    for each in (program, plain):
        QuantizePass().run(each)
    assert not program.graph.find_nodes(op="call_module")
    assert program.plan.qparams.keys() == plain.plan.qparams.keys()
    assert program.dump(plan=False).replace("stage=shared", "stage=calibrated") == plain.dump(plan=False)
    assert any("fixed scales" in reason for reason in program.inference_only)


def test_a_program_that_has_seen_nothing_is_refused() -> None:
    with pytest.raises(CalibrationError, match="head:in0 was never observed"):
        QuantizePass().run(prepared(LINEAR))


def test_nothing_planned_is_nothing_written() -> None:
    program = program_of(LINEAR)
    outcome = QuantizePass().run(program)
    assert not outcome.changed
    assert not any(is_quantize(node) for node in program.nodes())
