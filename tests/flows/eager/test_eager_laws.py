"""Laws of the eager flow, on models that nobody chose."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantc.flows import eager
from tests.support.eager_models import QUANTC, TORCH, Library, Staged, grids

WIDTH = 8
PARTS: dict[str, Any] = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "linear relu": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU()],
    "linear norm": lambda: [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)],
    "norm": lambda: [nn.LayerNorm(WIDTH)],
    "hardswish": lambda: [nn.Hardswish()],
    "leaky": lambda: [nn.LeakyReLU(0.2)],
    "relu": lambda: [nn.ReLU()],
    "relu6": lambda: [nn.ReLU6()],
    "dropout": lambda: [nn.Dropout(0.3)],
    "flat": lambda: [nn.Flatten()],
}


def build(library: Library, parts: list[str], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Staged(library, nn.Sequential(*(layer for part in parts for layer in PARTS[part]()))).eval()


def data(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(16, WIDTH, generator=generator) * 2 for _ in range(2)]


models = st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=6)
seeds = st.integers(0, 2**16)


@settings(max_examples=25)
@given(models, seeds)
def test_scales_are_torchs_and_results_within_a_step(parts: list[str], seed: int) -> None:
    model = build(QUANTC, parts, seed)
    fuse = eager.fusable(model, data(seed)[0])
    made = [
        library.quantized(build(library, parts, seed), fuse, data(seed), library.flow.get_default_qconfig("fbgemm"))
        for library in (TORCH, QUANTC)
    ]
    assert grids(made[0]) == grids(made[1])
    largest = max(scale for scale, _ in grids(made[0]).values())
    theirs, ours = (each(data(seed)[0]) for each in made)
    assert float((theirs - ours).abs().max()) <= 2 * largest


@settings(max_examples=25)
@given(models, seeds)
def test_fusing_what_is_found_changes_nothing_and_leaves_nothing_to_find(parts: list[str], seed: int) -> None:
    model, x = build(QUANTC, parts, seed), data(seed)[0]
    found = eager.fusable(model, x)
    fused = eager.fuse_modules(model, found) if found else model
    assert torch.allclose(fused(x), model(x), atol=1e-5)
    left = [
        names for names in eager.fusable(fused, x) if len({name for group in found for name in group} & {*names}) > 1
    ]
    assert left == []


@settings(max_examples=15)
@given(models, seeds)
def test_convert_does_not_depend_on_how_often_it_is_asked(parts: list[str], seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(QUANTC, parts, seed)
        fuse = eager.fusable(model, data(seed)[0])
        prepared = QUANTC.calibrated(model, fuse, data(seed), eager.get_default_qconfig("fbgemm"))
        before = {name: value.clone() for name, value in prepared.state_dict().items()}
        first, second = eager.convert(prepared), eager.convert(prepared)
    x = data(seed)[0]
    assert torch.equal(first(x), second(x))
    assert all(torch.equal(value, prepared.state_dict()[name]) for name, value in before.items())
