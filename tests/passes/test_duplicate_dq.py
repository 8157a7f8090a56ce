"""duplicate-dq: each reader of a dequantized tensor has an op of its own."""

from __future__ import annotations

import pytest
import torch

from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.duplicate_dq import DuplicateDq
from quantc.pipeline.pipeline import Pipeline
from quantc.qdq.ops import is_dequantize
from tests.support.text_programs import inputs_of, program_of

HEAD = """program "Readers" stage=quantized method=export mode=eval
  input %x : f32[2,3]
  %q : u8[2,3] = quantized_decomposed.quantize_per_tensor.default(%x, 0.5, 3, 0, 255, u8)
  %d : f32[2,3] = quantized_decomposed.dequantize_per_tensor.default(%q, 0.5, 3, 0, 255, u8)
"""
READERS = {
    "a chain": ("%a : f32[2,3] = relu(%d)", "%b : f32[2,3] = mul(%a, %d)", "%c : f32[2,3] = add(%d, %b)"),
    "a list": ("%a : f32[2,3] = relu(%d)", "%b : f32[6,3] = cat([%d, %a, %d])", "%c : f32[6,3] = abs(%b)"),
}


def duplicated(text: str) -> tuple[Program, Program]:
    before = program_of(text)
    return before, Pipeline((DuplicateDq(),)).run_on_copy(before, [Truth(), Verify(), Guard()])


def reads(program: Program) -> dict[str, set[str]]:
    return {node.name: {user.name for user in node.users} for node in program.nodes() if is_dequantize(node)}


@pytest.mark.parametrize("lines", READERS.values(), ids=READERS)
def test_each_reader_has_its_own_and_the_first_keeps_the_op(lines: tuple[str, ...]) -> None:
    before, after = duplicated(HEAD + "".join(f"  {line}\n" for line in lines) + "  output (%c,)\n")
    found = reads(after)
    assert found["d"] == {"a"}
    assert all(len(users) == 1 for users in found.values())
    assert set.union(*found.values()) == set.union(*reads(before).values())
    assert torch.equal(before(*inputs_of(before)), after(*inputs_of(after)))


def test_the_output_shares_with_the_first_reader() -> None:
    _, after = duplicated(HEAD + "  %a : f32[2,3] = relu(%d)\n  %b : f32[2,3] = neg(%d)\n  output (%a, %b, %d)\n")
    assert reads(after)["d"] == {"a", "output"}
    assert after.log[-1].notes == ("1 ops added",)


@pytest.mark.parametrize("line", ["%a : f32[2,3] = mul(%d, %d)", "%a : f32[2,3] = relu(%q)"], ids=["twice", "never"])
def test_one_reader_is_enough(line: str) -> None:
    before, after = duplicated(HEAD + f"  {line}\n  output (%a,)\n")
    assert not after.log[-1].changed
    assert after.dump("text") == before.dump("text")


def test_other_ops_that_many_read_are_not_copied() -> None:
    text = (
        HEAD + "  %r : f32[2,3] = relu(%d)\n  %a : f32[2,3] = neg(%r)\n  %b : f32[2,3] = exp(%r)\n  output (%a, %b)\n"
    )
    _, after = duplicated(text)
    assert not after.log[-1].changed
    assert len(after.node("r").users) == 2


def test_a_second_time_nothing_is_added() -> None:
    _, after = duplicated(HEAD + "".join(f"  {line}\n" for line in READERS["a chain"]) + "  output (%c,)\n")
    text = after.dump("text")
    assert not DuplicateDq().run(after)
    assert after.dump("text") == text
