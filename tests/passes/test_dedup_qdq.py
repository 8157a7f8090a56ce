"""dedup-qdq: what is said twice is said once, and no bit changes."""

from __future__ import annotations

import pytest
import torch

from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.dedup_qdq import DedupQdq
from quantc.passes.duplicate_dq import DuplicateDq
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_dequantize, is_quantize
from tests.support.text_programs import inputs_of, program_of

Q, D = (f"quantized_decomposed.{name}quantize_per_tensor.default" for name in ("", "de"))


def chain(*qparams: str) -> str:
    """x, quantized and dequantized in turn, each time what was just dequantized."""
    lines, source = [], "x"
    for index, row in enumerate(qparams):
        lines.append(f"  %q{index} : u8[2,3] = {Q}(%{source}, {row}, u8)")
        lines.append(f"  %d{index} : f32[2,3] = {D}(%q{index}, {row}, u8)")
        source = f"d{index}"
    head = 'program "Chain" stage=quantized method=export mode=eval\n  input %x : f32[2,3]\n'
    return head + "\n".join(lines) + f"\n  output (%{source},)\n"


def merged(program: Program) -> Program:
    return Pipeline((DedupQdq(),)).run_on_copy(program, [Truth(), Verify(), Guard()])


def count(program: Program) -> int:
    return sum(is_quantize(node) or is_dequantize(node) for node in program.nodes())


@pytest.mark.parametrize(
    ("qparams", "left"),
    [
        (("0.5, 3, 0, 255",) * 3, 2),
        (("0.5, 3, 0, 255", "0.25, 3, 0, 255"), 4),
        (("0.5, 3, 0, 255", "0.5, 4, 0, 255"), 4),
        (("0.5, 3, 0, 255", "0.5, 3, 0, 127"), 4),
        (("0.5, 3, 0, 255", "0.25, 3, 0, 255", "0.5, 3, 0, 255"), 6),
    ],
    ids=["the same", "another scale", "another zero point", "another range", "there and back"],
)
def test_a_tensor_is_rounded_again_only_for_other_qparams(qparams: tuple[str, ...], left: int) -> None:
    before = program_of(chain(*qparams))
    after = merged(before)
    assert count(after) == left
    assert torch.equal(before(*inputs_of(before)), after(*inputs_of(after)))


@pytest.mark.parametrize("scale", [1e-7, 0.1, 1 / 3, 12345.678])
def test_levels_that_were_dequantized_come_back_as_they_were(scale: float) -> None:
    """Which is why a quantize with the same qparams can go: on every level, in float32."""
    quantize, dequantize = torch.ops.quantized_decomposed.quantize_per_tensor, torch.ops.quantized_decomposed
    levels = torch.arange(256, dtype=torch.uint8)
    rest = (scale, 77, 0, 255, torch.uint8)
    assert torch.equal(quantize.default(dequantize.dequantize_per_tensor.default(levels, *rest), *rest), levels)


def test_it_undoes_duplicate_dq() -> None:
    head = chain("0.5, 3, 0, 255").rpartition("  output")[0]
    text = head + "  %one : f32[2,3] = relu(%d0)\n  %two : f32[2,3] = mul(%one, %d0)\n  output (%two,)\n"
    program = program_of(text)
    before = program.dump("text")
    assert DuplicateDq().run(program)
    assert program.dump("text") != before
    assert DedupQdq().run(program)
    assert program.dump("text") == before


def test_scales_that_are_constants_are_compared_by_where_they_come_from() -> None:
    name = "quantized_decomposed.quantize_per_channel.default"
    text = f"""program "Channels" stage=quantized method=export mode=eval
  input %x : f32[3,3]
  const %s = "s" : f32[3] buffer
  const %t = "t" : f32[3] buffer
  const %z = "z" : i64[3] buffer
  %one : i8[3,3] = {name}(%x, %s, %z, 0, -128, 127, i8)
  %two : i8[3,3] = {name}(%x, %s, %z, 0, -128, 127, i8)
  %three : i8[3,3] = {name}(%x, %t, %z, 0, -128, 127, i8)
  output (%one, %two, %three)
"""
    program = merged(program_of(text))
    assert count(program) == 2
    (output,) = program.graph.find_nodes(op="output")
    assert [node.name for node in output.args[0]] == ["one", "one", "three"]
    assert program.log[-1].notes == ("1 ops merged",)
