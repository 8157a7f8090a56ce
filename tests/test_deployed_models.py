"""The networks that count, as `.pte` and as `.onnx`, run by the runtimes: op by op within a step of the Q/DQ form, the same
answers, small, and on integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.bench.models import task_of, texts
from quantc.example import digits_cnn, digits_data
from quantc.program import Program
from quantc.quantizer import mode_config, quantizer_of
from tests.deployed_steps import worst_steps
from tests.sequence_architectures import GPT
from tests.zoo.recurrent import Tagger

pytest.importorskip("executorch")
pytest.importorskip("onnxruntime")
TARGETS = ("executorch", "onnx")
STEP = 1.001
"""One step; dequantized numbers are floats."""
SMALL = 0.3
HEADLESS = 0.97
"""Short of 0.99: the encoder has no head, so that its answers are the largest of 768 features of random weights, many of
which lie closer together than the roundings that turn over in a network this deep. Seen: 0.979 to 0.982."""
LOOKED_UP = qc.INT8_WEIGHT_ONLY.but(qmin=-127)

Batches = list[tuple[Any, ...]]
Made = tuple[nn.Module, Batches, Batches]


@dataclass(frozen=True)
class Network:
    """A network, and what has to hold for it in both files."""

    make: Callable[[], Made]
    modes: tuple[str, str] = ("static", "static")
    """In a `.pte`, and in `.onnx`."""
    on_integers: float = 0.95
    """The share of its quantized ops that the runtimes compute on integers, or look up as such."""
    same: float = 0.99
    """The share of answers, the largest of the last axis, that are those of the Q/DQ form."""
    is_large: bool = False


def built_in(name: str) -> Callable[[], Made]:
    def make() -> Made:
        task = task_of(name)
        return task.model, task.calibration, task.unseen

    return make


def digits() -> Made:
    model, _ = digits_cnn()
    batches, held_out = digits_data()
    count = len(batches[0])
    ends = range(count, len(held_out.images) + 1, count)
    return model, [(batch,) for batch in batches], [(held_out.images[end - count : end],) for end in ends]


def gpt() -> Made:
    torch.manual_seed(0)
    return GPT(width=256, vocabulary=256).eval(), texts(4, 2, 16, 256, seed=1), texts(8, 2, 16, 256, seed=2)


def tagger() -> Made:
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(12, 192, num_layers=2, batch_first=True, bidirectional=True), 384).eval()
    return model, texts(4, 8, 10, 32, seed=1), texts(4, 8, 10, 32, seed=2)


NETWORKS: dict[str, Network] = {
    "digits": Network(digits),
    "resnet18": Network(built_in("resnet18"), is_large=True),
    "mobilenetv2": Network(built_in("mobilenetv2"), is_large=True),
    "bert": Network(built_in("bert"), same=HEADLESS, is_large=True),
    "bert, dynamic": Network(built_in("bert"), ("dynamic", "dynamic"), same=HEADLESS, is_large=True),
    "lstm tagger": Network(tagger, ("dynamic", "static"), on_integers=0.2),
    "gpt": Network(gpt),
    "gpt, dynamic": Network(gpt, ("dynamic", "dynamic")),
}


def cases() -> Iterator[Any]:
    for name, network in NETWORKS.items():
        for target in TARGETS:
            is_slow = network.is_large or target == "executorch"  # which takes its time to lower
            yield pytest.param(name, target, marks=[pytest.mark.slow] if is_slow else [])


@cache
def made(name: str) -> Made:
    return NETWORKS[name].make()


def quantized(name: str, target: str) -> Program:
    """The network in Q/DQ form; with run-time scales, embeddings are stored in int8 as well."""
    model, calibration, _ = made(name)
    mode: Any = NETWORKS[name].modes[TARGETS.index(target)]
    program = qc.capture(model, calibration[0])
    if mode == "static":
        prepared = qc.prepare(program, target)
        qc.calibrate(prepared, calibration, progress="silent")
        return qc.convert(prepared)
    config = mode_config(quantizer_of(target), mode)
    has_words = any(isinstance(part, nn.Embedding) for part in model.modules())
    return qc.convert(
        qc.prepare(program, target, config=config.set_op("embedding", LOOKED_UP) if has_words else config)
    )


@pytest.mark.parametrize(("name", "target"), list(cases()))
@torch.no_grad()
def test_a_network_is_deployed(name: str, target: str) -> None:
    network, (model, _, unseen) = NETWORKS[name], made(name)
    program = quantized(name, target)
    lowered: Any = qc.lower(program, target)
    if target == "executorch":
        delegation = lowered.delegation()
        size, share = len(lowered.content), 1 - len(delegation.fallen_back) / len(delegation.rows)
    else:
        size, share = lowered.proto.ByteSize(), lowered.fusions().fraction
    assert share >= network.on_integers, lowered
    assert size <= SMALL * sum(parameter.numel() * 4 for parameter in model.parameters())
    same = torch.cat([(program(*x).argmax(-1) == lowered(*x).argmax(-1)).flatten() for x in unseen])
    assert same.double().mean() >= network.same
    steps = worst_steps(program, target, *unseen[0])
    assert max(steps.values(), default=0.0) <= STEP, sorted(steps.items(), key=lambda row: -row[1])[:5]
