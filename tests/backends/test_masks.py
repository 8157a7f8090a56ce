"""Masks are never quantized, and attention with any kind of mask survives quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import quantizer_of
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from tests.support.backend_cases import NAMES, sqnr
from tests.support.named_ops import naming

Mask = Callable[[Tensor, Tensor], Tensor]
"""From scores and a padding mask (1 where there is a token) to masked scores."""


def causal(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool).triu(1)


KINDS: dict[str, Mask] = {
    "none": lambda scores, padding: scores,
    "causal, filled with -inf": lambda scores, padding: scores.masked_fill(causal(scores), -math.inf),
    "causal, constant of -inf added": lambda scores, padding: (
        scores + torch.full((10, 10), -math.inf, device="cpu").triu(1)
    ),
    "causal by where": lambda scores, padding: torch.where(~causal(scores), scores, torch.tensor(-1e9)),
    "padding, -1e4": lambda scores, padding: scores + (1 - padding[:, None, None, :]) * -1e4,
    "padding, smallest float": lambda scores, padding: (
        scores + (1 - padding[:, None, None, :]) * torch.finfo(torch.float32).min
    ),
    "padding, subtracted": lambda scores, padding: scores - (1 - padding[:, None, None, :]) * 1e4,
    "padding, filled with -inf": lambda scores, padding: scores.masked_fill(padding[:, None, None, :] == 0, -math.inf),
    "padding, where": lambda scores, padding: torch.where(padding[:, None, None, :] > 0, scores, -1e4),
    "bias and padding": lambda scores, padding: (
        scores + (torch.arange(10.0)[None, :] / 10 + (1 - padding[:, None, None, :]) * -1e4)
    ),
    "scaled afterwards": lambda scores, padding: (scores * 8 + (1 - padding[:, None, None, :]) * -1e4) / 8,
}


class Attention(nn.Module):
    """Two heads, projections before and after."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = self.mask(q @ k.transpose(-2, -1) / math.sqrt(8), padding)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        result: Tensor = self.out(mixed)
        return result


class Sdpa(Attention):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        bias = self.mask(torch.zeros(x.shape[0], 1, 10, 10), padding)
        result: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return result


def inputs() -> tuple[Tensor, ...]:
    padding = torch.ones(3, 10)
    for row, length in enumerate(torch.randint(2, 11, (3,)).tolist()):
        padding[row, length:] = 0
    return torch.randn(3, 10, 16), padding


def quantized(model: nn.Module, program: Program, backend: str, many: Sequence[tuple[Tensor, ...]]) -> float:
    prepared = qc.prepare(program, backend, config=naming(program, backend))
    no_mask_is_observed(prepared, many)
    qc.calibrate(prepared, many)
    converted = qc.convert(prepared)
    with torch.no_grad():
        return sqnr(model(*many[0]), converted(*many[0]))


def no_mask_is_observed(prepared: Program, many: Sequence[tuple[Tensor, ...]]) -> None:
    """Run the batches by hand: no tensor that is to be quantized holds a number like those of masks."""
    watched = {site.node for group in prepared.plan.groups for site in group.values}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            made = super().run_node(n)
            assert n.name not in watched or bool((made.abs() < 1e3).all()), n.name
            return made

    for args in many:
        Watch(prepared.root, graph=prepared.graph).run(*args)


ATTENTIONS: dict[str, type[Attention]] = {"by hand": Attention, "sdpa": Sdpa}


@cache
def masked(attention: str, kind: str) -> tuple[nn.Module, Program, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    model = ATTENTIONS[attention](KINDS[kind]).eval()
    many = [inputs() for _ in range(4)]
    return model, qc.capture(model, many[0], method="fx"), many


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_masked_attention_survives(attention: str, kind: str, backend: str) -> None:
    model, program, many = masked(attention, kind)
    assert quantized(model, program, backend, many) > (30 if backend == "x86" else 20)


class Given(nn.Module):
    """The caller gives the mask to be added."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = self.qkv(x)
        q, k, v = made.chunk(3, -1)
        return (q @ k.mT / 4 + mask[:, None, :]).softmax(-1) @ v


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("value", [-math.inf, -1e4])
def test_a_mask_the_caller_gives_is_not_quantized(backend: str, value: float) -> None:
    torch.manual_seed(0)
    model = Given().eval()
    many = [
        (x, torch.zeros_like(padding).masked_fill(padding == 0, value)) for x, padding in (inputs() for _ in range(4))
    ]
    assert quantized(model, qc.capture(model, many[0], method="fx"), backend, many) > 20


def test_the_reason_names_where_the_number_comes_in() -> None:
    model = Attention(KINDS["padding, -1e4"]).eval()
    prepared = qc.prepare(qc.capture(model, inputs()), "qnnpack")
    total = next(node for node in prepared.graph.nodes if op_name(node) == "add")
    explained = str(quantizer_of("qnnpack").explain(prepared, total.name))
    assert "may hold a mask: -10000.0 comes in at mul" in explained
    softmax = next(node for node in prepared.graph.nodes if op_name(node) == "softmax")
    claim = prepared.plan.claims.get(softmax)
    assert claim is not None
    assert claim.rule == "softmax-of-float"


def test_integer_arithmetic_is_never_touched() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 16)
            self.out = nn.Linear(16, 4)

        def forward(self, ids: Tensor) -> Tensor:
            positions = (ids != 0).cumsum(1) * (ids != 0) + 1
            result: Tensor = self.out(self.table(positions.reshape(-1)) + self.table(ids.flatten()))
            return result

    ids = torch.randint(0, 20, (2, 6))
    for backend in NAMES:
        prepared = qc.prepare(qc.capture(Positions().eval(), (ids,)), backend)
        for group in prepared.plan.groups:
            for site in group.values:
                assert prepared.node(site.node).meta["val"].dtype is torch.float32
