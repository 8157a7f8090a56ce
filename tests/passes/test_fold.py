"""fold: constants are stored as integers, and what reads them computes the same bits."""

from __future__ import annotations

import numpy as np
import torch

from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.fold import Fold
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_quantize
from tests.support.text_programs import inputs_of, program_of

TEXT = """program "Net" stage=quantized method=export mode=eval
  input %x : f32[2,3]
  const %w = "layer.weight" : f32[4,3] param
  const %s = "layer.scale" : f32[4] buffer
  const %z = "layer.zero" : i64[4] buffer
  %q : i8[4,3] = quantized_decomposed.quantize_per_channel.default(%w, %s, %z, 0, -128, 127, i8)
  %d : f32[4,3] = quantized_decomposed.dequantize_per_channel.default(%q, %s, %z, 0, -128, 127, i8)
  %linear : f32[2,4] = linear(%x, %d)
  output (%linear,)
"""


def quantized(text: str = TEXT) -> Program:
    program = program_of(text)
    scale = program.tensor(program.node("s"))
    assert scale is not None
    scale.copy_(torch.tensor([0.01, 0.02, 0.03, 0.04]))
    return program


def folded(text: str = TEXT) -> Program:
    return Pipeline((Fold(),)).run(quantized(text), [Truth(), Verify(), Guard()])


def test_the_stored_integers_are_the_rounded_quotients() -> None:
    program = quantized()
    weight, scale, zero = (program.tensor(program.node(name)) for name in ("w", "s", "z"))
    assert weight is not None
    assert scale is not None
    assert zero is not None
    rows = weight.detach().numpy() / scale.numpy()[:, None]
    expected = np.clip(np.rint(rows) + zero.numpy()[:, None], -128, 127)
    Fold().run(program)
    stored = dict(program.root.named_buffers())["layer.weight_quantized"]
    assert stored.dtype == torch.int8
    assert np.array_equal(stored.numpy(), expected)


def test_the_float_weight_goes_and_the_bits_stay() -> None:
    before, after = quantized(), folded()
    assert torch.equal(before(*inputs_of(before)), after(*inputs_of(after)))
    assert set(after.root.state_dict()) == {"layer.weight_quantized", "layer.scale", "layer.zero"}
    assert not any(is_quantize(node) for node in after.nodes())
    assert after.log[-1].notes == ("1 constants quantized",)


def test_a_float_weight_that_another_op_reads_is_kept() -> None:
    text = TEXT.replace("  output (%linear,)", "  %most : f32[3] = amax(%w, [0])\n  output (%linear, %most)")
    program = folded(text)
    assert "layer.weight" in program.root.state_dict()
    assert program.tensor(program.node("w")) is not None


def test_what_is_computed_is_quantized_as_the_program_runs() -> None:
    text = TEXT.replace("(%w, %s", "(%abs, %s").replace("  %q :", "  %abs : f32[4,3] = abs(%x)\n  %q :")
    program = program_of(text.replace("input %x : f32[2,3]", "input %x : f32[4,3]").replace("[2,4]", "[4,4]"))
    before = program.dump("text")
    assert not Fold().run(program)
    assert program.dump("text") == before


def test_a_second_time_there_is_nothing_left() -> None:
    program = folded()
    before = program.dump("text")
    assert not Fold().run(program)
    assert program.dump("text") == before
