"""The pass `fuse-attention`: float attention that was taken apart is put together again as torch's fused op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.passes.fuse_attention import SDPA, FuseAttention, attention_at


class Attention(nn.Module):
    """Attention written out, in ways that torch's own op is and is not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = q @ k.transpose(-1, -2)
        if self.kind == "scaled":
            scores = scores * 0.5
        if self.kind == "divided":
            scores = scores / 4
        if self.kind == "by nothing":
            scores = scores * 0
        if self.kind == "masked":
            scores = scores + torch.ones(5, 5).triu(1) * -1e4
        weights = torch.softmax(scores, 2 if self.kind == "other axis" else -1)
        return (weights @ v, weights) if self.kind == "read twice" else weights @ v


def captured(kind: str, *shapes: tuple[int, ...]) -> tuple[qc.Program, list[Tensor]]:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes or ((2, 3, 5, 4),) * 3]
    return qc.capture(Attention(kind).eval(), tuple(tensors)), tensors


def fuse_attention(program: qc.Program) -> tuple[str, ...]:
    """The notes of the pass."""
    return FuseAttention().run(program).notes


def fused(program: qc.Program) -> list[Any]:
    return [node for node in program.nodes() if node.target is SDPA]


@pytest.mark.parametrize(("kind", "scale"), [("plain", 1.0), ("scaled", 0.5), ("divided", 0.25)])
def test_attention_becomes_one_op_with_its_scale(kind: str, scale: float) -> None:
    program, (q, k, v) = captured(kind)
    assert fuse_attention(program) == ("fused 1 attentions",)
    (node,) = fused(program)
    assert node.kwargs == {"scale": scale}
    weights = torch.softmax((q.double() @ k.double().mT) * scale, -1)
    torch.testing.assert_close(program(q, k, v).double(), weights @ v.double(), rtol=1e-5, atol=1e-6)
    assert fuse_attention(program) == ()


@pytest.mark.parametrize("kind", ["masked", "other axis", "read twice", "by nothing"])
def test_what_is_more_or_less_than_attention_stays_as_it_is(kind: str) -> None:
    program, tensors = captured(kind)
    before = program.dump()
    assert fuse_attention(program) == ()
    assert program.dump() == before
    assert not fused(program)
    assert torch.equal(torch.as_tensor(first_of(program(*tensors))), first_of(Attention(kind)(*tensors)))


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 5, 4), (3, 5, 4), (3, 5, 4)],
        [(2, 3, 5, 4), (1, 3, 5, 4), (2, 3, 5, 4)],
        [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 6)],
    ],
    ids=["three axes", "broadcast", "values of another size"],
)
def test_operands_that_the_op_would_not_take_fast_stay_apart(shapes: list[tuple[int, ...]]) -> None:
    program, _ = captured("plain", *shapes)
    assert fuse_attention(program) == ()


def test_queries_may_be_more_or_fewer_than_keys() -> None:
    program, (q, k, v) = captured("plain", (2, 3, 7, 4), (2, 3, 5, 4), (2, 3, 5, 4))
    root = next(node for node in reversed(list(program.nodes())) if "matmul" in node.name)
    match = attention_at(root)
    assert match is not None
    assert [node.name for node in (match.query, match.key, match.value)] == ["q", "k", "v"]
    assert fuse_attention(program) == ("fused 1 attentions",)
    assert program(q, k, v).shape == (2, 3, 7, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.inner = nn.Linear(8, 24), Attention("divided")

    def forward(self, x: Tensor) -> Any:
        return self.inner(*self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0))


def test_it_is_fused_when_a_program_is_lowered_and_hides_no_nan() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    made = qc.lower(qc.quantize(Model().eval(), (x,), mode="dynamic").program, "x86")
    assert "scaled_dot_product_attention" in made.module.code
    expected = made.program(x).detach()
    assert float((made(x) - expected).abs().max()) <= 0.02 * float(expected.abs().max())
    x[0, 3, 1] = math.nan
    assert not made.module(x)[0].isfinite().any()


def first_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]
