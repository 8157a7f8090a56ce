"""The networks that are deployed by the tests, and what is measured of each in a `.pte` and in `.onnx`, on the runtimes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.bench.models import COUNT, MODELS, UNSEEN_SEED, initialise, task_of, texts
from quantc.bench.networks import TextEncoder
from quantc.cli.example import digits_cnn, digits_data
from quantc.ir.program import Program
from quantc.support.sqnr import Noise
from tests.support.deployed_steps import worst_steps
from tests.support.sequence_architectures import GPT
from tests.zoo.recurrent import Tagger

TARGETS = ("executorch", "onnx")
LOOKED_UP = qc.INT8_WEIGHT_ONLY.but(qmin=-127)
TAGS = 9
KNOWN_WORDS = 512
"""The words that the tagger on top of the encoder was fitted to."""

Batches = list[tuple[Any, ...]]
Made = tuple[nn.Module, Batches, Batches]
"""A model, batches to calibrate it with, and batches that nobody has seen."""


def built_in(name: str, count: int) -> Callable[[], Made]:
    """A model of the benchmark, and as many unseen batches."""

    def make() -> Made:
        task = task_of(name)
        entry = MODELS[name]
        unseen = [
            batch
            for seed in range(UNSEEN_SEED, UNSEEN_SEED + math.ceil(count / COUNT))
            for batch in entry.data(seed, entry.batch)
        ]
        return task.model, task.calibration, unseen[:count]

    return make


def digits() -> Made:
    model, _ = digits_cnn()
    batches, held_out = digits_data()
    count = len(batches[0])
    ends = range(count, len(held_out.images) + 1, count)
    return model, [(batch,) for batch in batches], [(held_out.images[end - count : end],) for end in ends]


def gpt() -> Made:
    torch.manual_seed(0)
    return GPT(width=256, vocabulary=256).eval(), texts(4, 2, 16, 256, seed=1), texts(32, 2, 16, 256, seed=2)


def tagger() -> Made:
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(12, 192, num_layers=2, batch_first=True, bidirectional=True), 384).eval()
    return model, texts(4, 8, 10, 32, seed=1), texts(16, 8, 10, 32, seed=2)


class TaggedText(nn.Module):
    """The encoder, and a head that gives each token a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = initialise(TextEncoder())
        self.head = nn.Linear(768, TAGS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(tokens))
        return logits


@torch.no_grad()
def random_tags() -> Made:
    """A head of random weights."""
    torch.manual_seed(0)
    model = TaggedText().eval()
    return model, texts(4, 1, 128, 30522, seed=1), texts(8, 1, 128, 30522, seed=2)


@torch.no_grad()
def fitted_tags() -> Made:
    """A head that was fitted, by least squares: the tag of a token is that of its word."""
    torch.manual_seed(0)
    model = TaggedText().eval()
    sentences = texts(64, 1, 128, KNOWN_WORDS, seed=0)
    features = torch.cat([model.encoder(*each).flatten(0, 1) for each in sentences]).double()
    answers = torch.cat([each[0].flatten() for each in sentences]) % TAGS
    wanted = nn.functional.one_hot(answers, TAGS).double()
    bound = features.T @ features + 1e-3 * len(features) * torch.eye(features.shape[1], dtype=torch.float64)
    model.head.weight.copy_(torch.linalg.solve(bound, features.T @ wanted).T)
    model.head.bias.zero_()
    return model, texts(4, 1, 128, KNOWN_WORDS, seed=1), texts(8, 1, 128, KNOWN_WORDS, seed=2)


@dataclass(frozen=True)
class Network:
    """A network, and how it is quantized."""

    make: Callable[[], Made]
    modes: tuple[str, str] = ("static", "static")
    """In a `.pte`, and in `.onnx`."""
    for_executorch: qc.QuantConfig | None = None
    """What is asked for beyond the mode, in a `.pte`."""
    is_large: bool = False

    def mode_for(self, target: str) -> Any:
        return self.modes[TARGETS.index(target)]


NETWORKS: dict[str, Network] = {
    "digits": Network(digits),
    "resnet18": Network(built_in("resnet18", 100), is_large=True),
    "mobilenetv2": Network(built_in("mobilenetv2", 100), is_large=True),
    "bert": Network(fitted_tags, is_large=True),
    "bert, dynamic": Network(fitted_tags, ("dynamic", "dynamic"), is_large=True),
    "bert, random head": Network(random_tags, is_large=True),
    "lstm tagger": Network(tagger, for_executorch=qc.QuantConfig().set_op("lstm", qc.INT8_TOKEN)),
    "lstm tagger, dynamic": Network(tagger, ("dynamic", "dynamic")),
    "gpt": Network(gpt),
    "gpt, dynamic": Network(gpt, ("dynamic", "dynamic")),
}


@cache
def made(name: str) -> Made:
    return NETWORKS[name].make()


@dataclass(frozen=True, eq=False)
class Forms:
    """A network in the forms that are compared."""

    model: nn.Module
    qdq: Program
    integer: Program
    deployed: Any
    unseen: Batches
    target: str


def forms(name: str, target: str) -> Forms:
    """The network quantized for a target and deployed there; with run-time scales, embeddings are stored in int8 too."""
    model, calibration, unseen = made(name)
    mode = NETWORKS[name].mode_for(target)
    program = qc.capture(model, calibration[0])
    config = NETWORKS[name].for_executorch if target == "executorch" else None
    if mode != "static":
        config = mode_config(quantizer_of(target), mode)
        if any(isinstance(part, nn.Embedding) for part in model.modules()):
            config = config.set_op("embedding", LOOKED_UP)
    prepared = qc.prepare(program, target, config=config)
    if mode == "static":
        qc.calibrate(prepared, calibration, progress="silent")
    quantized = qc.convert(prepared)
    integer = qc.convert(prepared, to="integer")
    return Forms(model, quantized, integer, qc.lower(quantized, target), unseen, target)


# -- what is measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A deployed network beside the others."""

    loss: float
    """How far the Q/DQ form is from the float model, in dB."""
    sqnr: float
    """How far the deployed one is from the Q/DQ form."""
    integer_sqnr: float
    """How far the exact integer form is from the Q/DQ form."""
    deployed_loss: float
    """How far the deployed one is from the float model."""
    answers: int
    """How many are compared: the largest of the last axis."""
    same: float
    """The share of answers that are those of the Q/DQ form."""
    integer_same: float
    """The share that the integer form has."""
    margin: float
    """Of the answers that differ: by how much the Q/DQ form prefers its own, at most, in units of what quantizing has
    changed in a logit (root mean square)."""
    steps: float
    """Op by op, in steps of their scales: the farthest from the Q/DQ form, fed the same."""
    ops: int
    """How many tensors that is measured for."""
    size: float
    """Of the float parameters."""
    share: float
    """Of the quantized ops, those that are computed on integers, or looked up as such."""


@torch.no_grad()
def measured(found: Forms) -> Measured:
    exact, want, integer, got = (
        [form(*batch) for batch in found.unseen] for form in (found.model, found.qdq, found.integer, found.deployed)
    )
    same, margins = _answers(want, got)
    noise = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(exact, want, strict=True)) / _count(exact))
    differing = margins[~same]
    steps = worst_steps(found.qdq, found.target, *found.unseen[0])
    size, share = _size_and_share(found)
    return Measured(
        loss=_sqnr(exact, want),
        sqnr=_sqnr(want, got),
        integer_sqnr=_sqnr(want, integer),
        deployed_loss=_sqnr(exact, got),
        answers=len(same),
        same=float(same.double().mean()),
        integer_same=float(_answers(want, integer)[0].double().mean()),
        margin=float(differing.max()) / noise if len(differing) else 0.0,
        steps=max(steps.values(), default=0.0),
        ops=len(steps),
        size=size / sum(parameter.numel() * 4 for parameter in found.model.parameters()),
        share=share,
    )


def _size_and_share(found: Forms) -> tuple[int, float]:
    deployed = found.deployed
    if found.target == "onnx":
        return deployed.proto.ByteSize(), deployed.fusions().fraction
    delegation = deployed.delegation()
    return len(deployed.content), 1 - len(delegation.fallen_back) / len(delegation.rows)


def _answers(want: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Which answers are the same, and by how much the first form prefers its own to its second best."""
    left, right = (torch.cat([each.flatten(0, -2) for each in form]) for form in (want, got))
    best = left.topk(2, dim=-1)
    return best.indices[:, 0] == right.argmax(-1), best.values[:, 0] - best.values[:, 1]


def _count(form: Sequence[Tensor]) -> int:
    return sum(each.numel() for each in form)


def _sqnr(reference: Any, value: Any) -> float:
    noise = Noise()
    noise.add(reference, value)
    return noise.sqnr
