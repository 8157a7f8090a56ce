"""How much of a model's signal survives: encoders, outliers, and the granularity of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.x86 import X86
from quantc.ir.program import Program
from quantc.spec.formats import PerTensor
from quantc.spec.spec import UINT8, QuantSpec
from tests.support.encoders import TextEncoder, ViT, glorot, images, initialise, texts
from tests.support.named_ops import naming
from tests.support.oracles import Batches, int8_share, pt2e_x86, sqnr, whole_sqnr

ENOUGH = 25.0
"""dB on unseen inputs."""
SHARE = 0.9
"""Of the multiply-adds, int8 by int8."""


def quantized(model: nn.Module, batches: Batches, backend: Backend = X86) -> Program:
    """With products of two activations quantized too, where the model has any."""
    program = qc.capture(model, batches[0])
    prepared = qc.prepare(program, backend, config=naming(program, backend))
    qc.calibrate(prepared, batches)
    return qc.convert(prepared)


@dataclass(frozen=True)
class Encoder:
    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int, int], Batches]
    """Batches by their number and the seed."""


SMALL = (
    Encoder(
        "vit-small",
        lambda: initialise(ViT(width=64, heads=2, depth=4, image=64, patch=8)),
        lambda count, seed: images(count, 4, 64, seed),
    ),
    Encoder(
        "vit-small-glorot",
        lambda: glorot(ViT(width=64, heads=2, depth=4, image=64, patch=8)),
        lambda count, seed: images(count, 4, 64, seed),
    ),
    Encoder(
        "text-small",
        lambda: initialise(TextEncoder(width=128, heads=4, depth=3, length=32, words=500)),
        lambda count, seed: texts(count, 4, 32, 500, seed),
    ),
)
FULL = (
    Encoder("vit-tiny", lambda: initialise(ViT()), lambda count, seed: images(count, 2, 224, seed)),
    Encoder("vit-tiny-glorot", lambda: glorot(ViT()), lambda count, seed: images(count, 2, 224, seed)),
    Encoder("text-6x768", lambda: initialise(TextEncoder()), lambda count, seed: texts(count, 1, 128, 30522, seed)),
)


def check_encoder(encoder: Encoder) -> None:
    model, calibration, unseen = encoder.build(), encoder.data(8, 1), encoder.data(4, 2)
    program = quantized(model, calibration)
    share, rest = int8_share(program.module, unseen[0])
    assert share >= SHARE, rest
    assert whole_sqnr(model, program, unseen) >= ENOUGH


@pytest.mark.parametrize("encoder", SMALL, ids=lambda encoder: encoder.name)
def test_small_encoders(encoder: Encoder) -> None:
    check_encoder(encoder)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", FULL, ids=lambda encoder: encoder.name)
def test_full_encoders(encoder: Encoder) -> None:
    check_encoder(encoder)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", FULL, ids=lambda encoder: encoder.name)
def test_full_encoders_beside_pt2e(encoder: Encoder) -> None:
    """Not below torchao's PT2E with the same ops in int8, each with its own defaults.

    Theirs leaves embeddings float, so here ours does too: stored in int8 they cost the text encoder 0.5 dB. Half a dB is
    allowed, because the choice of calibration and evaluation data moves the ViT by that: 30.2 and 31.0 dB with two seeds.
    """
    model, calibration, unseen = encoder.build(), encoder.data(8, 1), encoder.data(4, 2)
    same_ops = replace(X86, table=X86.table.without("embedding"))
    ours = whole_sqnr(model, quantized(model, calibration, same_ops), unseen)
    theirs = whole_sqnr(model, pt2e_x86(model, calibration, with_matmul=True), unseen)
    assert ours >= theirs - 0.5


# -- ranges ----------------------------------------------------------------------------------------------------


def with_act(spec: QuantSpec) -> Backend:
    return X86.but(act=spec)


def outlying(count: int, seed: int) -> Batches:
    """Normal data in which one element of a million is a hundred times the spread."""
    generator = torch.Generator().manual_seed(seed)
    batches: Batches = [(torch.randn(256, 256, generator=generator),) for _ in range(count)]
    for (x,) in batches[::16]:
        x[int(torch.randint(256, (), generator=generator)), 0] = 100.0
    return batches


@pytest.mark.parametrize("backend", [X86, with_act(UINT8.but(observe="mse"))], ids=["default", "mse"])
def test_mse_beats_min_max_on_rare_outliers(backend: Backend) -> None:
    """Clipping pays where outliers are too rare to carry the signal. With ten in 16 384, twenty to forty times
    the spread, they carry a third of it, and min-max is better on unseen data."""
    torch.manual_seed(0)
    model, calibration, unseen = nn.Linear(256, 64).eval(), outlying(32, 1), outlying(32, 2)
    found = whole_sqnr(model, quantized(model, calibration, backend), unseen)
    by_min_max = whole_sqnr(model, quantized(model, calibration, with_act(UINT8.but(observe="minmax"))), unseen)
    assert found > by_min_max + 1.0


class WideConv(nn.Module):
    """A convolution whose output channels differ in size by a factor of 300, as after folding batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        with torch.no_grad():
            self.conv.weight.mul_(torch.logspace(-2.5, 0, 16).reshape(16, 1, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.conv(x)


def test_weights_per_channel_beat_per_tensor() -> None:
    torch.manual_seed(0)
    model = WideConv().eval()
    batches: Batches = [(torch.randn(2, 8, 12, 12),) for _ in range(4)]
    whole = X86.but(weight=X86.outcome("weight").spec.but(granularity=PerTensor()))
    per_channel, per_tensor = (quantized(model, batches, backend) for backend in (X86, whole))
    # the small channels are the ones that suffer, so each is measured against itself
    x = torch.randn(2, 8, 12, 12)
    with torch.no_grad():
        reference, fine, coarse = model(x), per_channel(x), per_tensor(x)
    gains = [sqnr(reference[:, c], fine[:, c]) - sqnr(reference[:, c], coarse[:, c]) for c in range(4)]
    assert min(gains) > 10
