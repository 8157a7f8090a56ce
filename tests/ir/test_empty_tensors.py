"""Tensors without elements: caches that hold nothing yet, as constants, buffers and inputs, on every target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc

WIDTH, HEADS = 16, 2
TARGETS = ("x86", "qnnpack", "onnx", "executorch")


class Cached(nn.Module):
    """Attention over what a cache holds and what is new."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], HEADS, -1).transpose(1, 2)

    def attend(self, x: Tensor, keys: Tensor, values: Tensor) -> Any:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        k, v = torch.cat([keys, k], -2), torch.cat([values, v], -2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Lazy(Cached):
    """As DynamicCache of transformers begins: a tensor of no axis but one, without elements."""

    def forward(self, x: Tensor) -> Any:
        return self.attend(x, torch.tensor([]), torch.tensor([]))


class Buffered(Cached):
    """A cache of no steps, stored with the model."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, HEADS, 0, WIDTH // HEADS))

    def forward(self, x: Tensor) -> Any:
        return self.attend(x, self.keys, self.keys)


class Given(Cached):
    """A cache of no steps, given by the caller."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Any:
        return self.attend(x, keys, values)


class Kept(nn.Module):
    """A model that holds, and yields, a tensor without elements."""

    nothing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("nothing", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, torch.cat([y.flatten(0, 1)[:0], self.nothing]) * 2


def inputs_of(model: nn.Module, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, WIDTH, generator=generator)
    empty = torch.zeros(2, HEADS, 0, WIDTH // HEADS)
    return (x, empty, empty) if isinstance(model, Given) else (x,)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        pytest.param(kind, target, marks=[pytest.mark.slow] if target == "executorch" and kind is not Lazy else [])
        for kind in (Lazy, Buffered, Given, Kept)
        for target in TARGETS
    ],
)
def test_an_empty_cache_quantizes_and_runs(kind: type[nn.Module], target: str) -> None:
    if target == "executorch":
        pytest.importorskip("executorch")
    torch.manual_seed(0)
    model = kind().eval()
    batches = [inputs_of(model, seed) for seed in range(3)]
    result = qc.quantize(model, inputs_of(model), batches, backend=target)
    lowered = qc.lower(result.program, target)
    wanted, found = (_leaves(each(*inputs_of(model))) for each in (model, lowered))
    assert [y.shape for y in found] == [y.shape for y in wanted]
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0.05)
    assert result.report.coverage.rows_for("quantized")


@pytest.mark.parametrize("target", TARGETS[:3])
def test_an_empty_cache_without_scales_of_activations(target: str) -> None:
    model = Lazy().eval()
    result = qc.quantize(model, inputs_of(model), backend=target, mode="weight-only")
    found = qc.lower(result.program, target)(*inputs_of(model))
    torch.testing.assert_close(found, model(*inputs_of(model)), rtol=0, atol=0.05)


def _leaves(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def test_a_cat_with_nothing_is_what_is_left() -> None:
    program = qc.pipelines.inference().run_on_copy(qc.capture(Lazy().eval(), inputs_of(Lazy())))
    assert "cat(" not in str(program)


def test_a_cat_of_another_type_stays() -> None:
    class Promoted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.zeros(0, 4), x])

    program = qc.capture(Promoted().eval(), (torch.arange(8).reshape(2, 4),))
    made = qc.pipelines.inference().run_on_copy(program)(torch.arange(8).reshape(2, 4))
    assert made.dtype is torch.float32
