"""decompose-attention: the same numbers as torch's own attention, over shapes, masks, scales and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.errors import ModeError
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.ir.types import type_of
from quantc.passes.decompose_attention import DecomposeAttention
from quantc.pipeline.pipeline import Pipeline

PIPELINE = Pipeline((DecomposeAttention(),))


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options)


def taken_apart(model: nn.Module, inputs: tuple[Tensor, ...], **how: Any) -> Program:
    program = qc.capture(model, inputs, **how)
    program = PIPELINE.run(program, [Truth(), Verify(), Guard()])
    assert all(type_of(node) is not None for node in program.graph.nodes if node.op == "call_function")
    return program


def ops(program: Program) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Attention, tuple[Tensor, ...]]:
    torch.manual_seed(draw(st.integers(0, 1000)))
    rows, columns, width, out = (draw(st.integers(1, 5)) for _ in range(4))
    heads = draw(st.sampled_from([(), (1,), (4,)]))
    batch = draw(st.sampled_from([(), (2,), (2, 3)])) if heads else draw(st.sampled_from([(), (2,)]))
    options: dict[str, Any] = {}
    kv = heads
    if heads == (4,) and draw(st.booleans()):
        options["enable_gqa"] = True
        kv = (draw(st.sampled_from([1, 2, 4])),)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([1.0, 0.3, 2.0]))
    inputs = [
        torch.randn(*batch, *heads, rows, width),
        torch.randn(*batch, *kv, columns, width),
        torch.randn(*batch, *kv, columns, out),
    ]
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        lead = draw(st.sampled_from([(), (*batch, *heads)]))
        kept = torch.rand(*lead, rows, columns) > 0.4
        inputs.append(kept if kind == "bool" else torch.randn(*lead, rows, columns).masked_fill(~kept, -torch.inf))
    return Attention(**options).eval(), tuple(inputs)


@settings(max_examples=15)
@given(cases())
def test_the_numbers_are_torchs(case: tuple[Attention, tuple[Tensor, ...]]) -> None:
    model, inputs = case
    expected = model(*inputs)
    program = taken_apart(model, inputs, method="fx")
    assert "scaled_dot_product_attention" not in ops(program)
    torch.testing.assert_close(program(*inputs), expected, rtol=1e-4, atol=1e-5)


def test_a_row_that_is_masked_out_gives_zeros_as_in_torch() -> None:
    q = torch.randn(1, 2, 3, 4)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    program = taken_apart(Attention().eval(), (q, q, q, mask))
    result = program(q, q, q, mask)
    assert torch.equal(result[..., 1, :], torch.zeros(1, 2, 4))
    torch.testing.assert_close(result, F.scaled_dot_product_attention(q, q, q, mask))


def test_dynamic_shapes_are_kept() -> None:
    length, batch = torch.export.Dim("length", min=2, max=64), torch.export.Dim("batch", min=1, max=16)
    shapes = {name: {0: batch, 2: length} for name in ("q", "k", "v")}
    inputs = tuple(torch.randn(2, 2, 5, 4) for _ in range(3))
    program = taken_apart(Attention(is_causal=True).eval(), inputs, dynamic_shapes=shapes)
    for rows in (2, 5, 11):
        q, k, v = (torch.randn(3, 2, rows, 4) for _ in range(3))
        torch.testing.assert_close(program(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_dropout_that_is_on_leaves_it_whole() -> None:
    q = torch.randn(2, 3, 4)
    program = taken_apart(Attention(dropout_p=0.5).eval(), (q, q, q))
    assert ops(program) == ["scaled_dot_product_attention"]
    assert "is left whole: its dropout is 0.5" in program.log[-1].notes[0]
    assert not program.log[-1].changed


def test_unknown_types_leave_it_whole() -> None:
    program = PIPELINE.run(qc.capture(Attention().eval(), method="fx"), [Truth(), Verify()])
    assert "the type of q is unknown" in program.log[-1].notes[0]
    assert "scaled_dot_product_attention" in ops(program)


class WithDropout(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1 if self.training else 0.0)


def test_dropout_that_was_off_cannot_be_switched_on_again() -> None:
    q = torch.randn(2, 3, 4)
    program = taken_apart(WithDropout().eval(), (q,))
    assert not program.modes.rows
    with pytest.raises(ModeError, match="without its dropout"):
        program.train()


def test_running_it_again_changes_nothing() -> None:
    q = torch.randn(2, 3, 4)
    program = taken_apart(Attention(is_causal=True).eval(), (q, q, q))
    text = program.dump("text")
    PIPELINE.run(program, [Truth()])
    assert not program.log[-1].changed
    assert program.dump("text") == text
