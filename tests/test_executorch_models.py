"""Whole networks in ExecuTorch: near the Q/DQ form, small, and in the delegate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.bench.models import task_of, texts
from tests.executorch_models import sqnr
from tests.sequence_architectures import GPT

pytest.importorskip("executorch")
pytestmark = pytest.mark.slow
MARGIN = 3.0
"""dB: two exact ways to round at ties end as far apart as either ends from the Q/DQ form, in networks this deep."""
SMALL = 0.3
TABLES = qc.QuantConfig().set_op("embedding", qc.INT8_WEIGHT_ONLY)

Made = tuple[nn.Module, list[tuple[Any, ...]], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Network:
    make: Callable[[], Made]
    mode: Any = "static"
    delegated: float = 0.95


def built_in(name: str) -> Callable[[], Made]:
    def make() -> Made:
        task = task_of(name)
        return task.model, task.calibration, task.unseen

    return make


def gpt() -> Made:
    torch.manual_seed(0)
    return GPT(width=256, vocabulary=256).eval(), texts(4, 2, 16, 256, seed=1), texts(2, 2, 16, 256, seed=2)


NETWORKS: dict[str, Network] = {
    "resnet18": Network(built_in("resnet18")),
    "mobilenetv2": Network(built_in("mobilenetv2")),
    "bert": Network(built_in("bert")),
    "lstm": Network(built_in("lstm"), "dynamic", 0.5),
    "gpt": Network(gpt),
    "gpt, dynamic": Network(gpt, "dynamic", 0.9),
}


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_a_network_is_small_delegated_and_near_the_program(name: str) -> None:
    network = NETWORKS[name]
    model, calibration, unseen = network.make()
    is_static = network.mode == "static"
    config = None if is_static else TABLES
    has_words = any(isinstance(part, nn.Embedding) for part in model.modules())
    result = qc.quantize(
        qc.capture(model, calibration[0]),
        None,
        calibration if is_static else None,
        "executorch",
        mode=network.mode,
        config=config if has_words else None,
    )
    lowered = qc.lower(result.program, "executorch")
    assert lowered.delegation().fraction >= network.delegated, lowered.delegation()
    assert len(lowered.content) <= SMALL * sum(parameter.numel() * 4 for parameter in model.parameters())
    x = unseen[0]
    exact, want, got = model(*x), result.program(*x), lowered(*x)
    loss = sqnr(exact, want)
    assert sqnr(exact, got) >= loss - 1, "as near the float model as the Q/DQ form"
    if is_static:
        integer = qc.convert(result.prepared, to="integer")
        assert sqnr(want, got) >= sqnr(want, integer(*x)) - MARGIN, "as near the Q/DQ form as the exact integer form"
    else:
        assert sqnr(want, got) >= loss + 3
