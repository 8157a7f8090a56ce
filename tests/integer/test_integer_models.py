"""The integer form of whole models beside their Q/DQ form: op by op, and as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.bench.networks import MobileNetV2
from quantc.cli.example import digits_cnn, digits_data
from quantc.inspect.agreement import Agreement, agreement
from quantc.ir.program import Program
from quantc.passes.snap_bias import SnapBias
from tests.support.encoders import TextEncoder, glorot, images, texts
from tests.support.image_architectures import ResNet18
from tests.support.oracles import Batches, whole_sqnr

BACKENDS = ("x86", "qnnpack", "executorch")
EQUAL = 0.999
"""The least part of elements, clear of ties, on which the two forms of an op must agree."""
FLOAT_ERROR = 1e-5
"""For results in float: of the largest value."""
CLOSER = 10.0
"""dB by which the two forms must be closer to each other than Q/DQ is to the float model."""
SLACK = 2.0
"""dB between two distances that are both the work of chance."""


def _digits(count: int, seed: int) -> Batches:
    """Real images: an even seed gives some that were held out."""
    calibration, held_out = digits_data()
    batches = torch.split(held_out.images, 32) if seed % 2 == 0 else calibration
    return [(batch,) for batch in batches[:count]]


def settled(build: Callable[[], nn.Module], batches: Batches) -> nn.Module:
    """A model whose batch norms have seen data: untrained ones let the signal die out, or grow."""
    torch.manual_seed(0)
    model = build().train()
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d) and part.num_batches_tracked == 0]
    if norms:
        with torch.no_grad():
            for batch in batches:
                model(*batch)
    return model.eval()


@dataclass(frozen=True)
class Subject:
    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int, int], Batches]
    """Batches by their number and the seed."""


SUBJECTS = (
    Subject("resnet18", ResNet18, lambda count, seed: images(count, 4, 96, seed)),
    Subject("mobilenet_v2", MobileNetV2, lambda count, seed: images(count, 4, 32, seed)),
    Subject("digits", lambda: digits_cnn()[0], _digits),
    Subject(
        "bert",
        lambda: glorot(TextEncoder(width=128, heads=4, depth=3, length=32, words=500)),
        lambda count, seed: texts(count, 4, 32, 500, seed),
    ),
)
FULL = (
    Subject("resnet18-full", lambda: ResNet18(64, 1000), lambda count, seed: images(count, 2, 224, seed)),
    Subject("bert-6x768", lambda: glorot(TextEncoder()), lambda count, seed: texts(count, 1, 128, 30522, seed)),
)


@dataclass(frozen=True)
class Forms:
    """A model and what became of it."""

    model: nn.Module
    qdq: Program
    integer: Program
    unseen: Batches


@cache
def forms(subject: Subject, backend: str) -> Forms:
    calibration = subject.data(4, 1)
    model = settled(subject.build, calibration)
    prepared = qc.prepare(qc.capture(model, calibration[0]), backend)
    qc.calibrate(prepared, calibration)
    return Forms(model, qc.convert(prepared), qc.convert(prepared, to="integer"), subject.data(2, 2))


def check_ops(found: Agreement) -> None:
    """What CONTRACTS promises of every op."""
    assert found.rows
    for row in found.rows:
        assert row.worst <= 1, str(found)
        assert row.clear_equal >= EQUAL, str(found)
        assert row.float_error is None or row.float_error <= FLOAT_ERROR, str(found)


class InFloat64(fx.Interpreter):
    """A program in Q/DQ form with its float arithmetic in float64: the same roundings, of exact values.

    What is a float32, as the inputs are, is quantized in float32: there the integer form does so too.
    """

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target)
        if "dequantize_per_tensor" in name:
            return (args[0].double() - args[2]) * float(np.float32(args[1]))
        if "dequantize_per_channel" in name:
            shape = [-1 if dim == args[3] else 1 for dim in range(args[0].dim())]
            return (args[0].double() - args[2].reshape(shape)) * args[1].double().reshape(shape)
        if "quantize_per_tensor" in name:
            real, narrow = args[0], args[0].float()
            exactly = torch.round(real / float(np.float32(args[1])))
            levels = torch.where(narrow == real, torch.round(narrow * (1.0 / args[1])).double(), exactly) + args[2]
            return levels.clamp(args[3], args[4]).to(args[5])
        return super().call_function(target, args, kwargs)


def check_whole(made: Forms) -> None:
    """The integer form is far closer to exact Q/DQ than Q/DQ to float, or no farther than float32 makes Q/DQ itself.

    The first holds where nothing is left in float; ops that are compute in float32 in the integer form too. Biases are as the integer form has them: one that is off by 1e-3 of a step is an input to every later rounding. So
    is an error of float32: a handful of elements that it turns over reaches all of a deep network. So the yardstick is
    the Q/DQ form computed in float64.
    """
    twin = qc.Pipeline((SnapBias(),)).run_on_copy(made.qdq)
    exact = InFloat64(twin.module).run
    to_float = whole_sqnr(made.model, made.qdq, made.unseen)
    by_float32 = whole_sqnr(twin, exact, made.unseen)
    by_chance = min(to_float + CLOSER, by_float32 - SLACK)
    all_integer = made.integer.coverage().counts["float"] == 0
    assert whole_sqnr(exact, made.integer, made.unseen) >= (to_float + CLOSER if all_integer else by_chance)
    assert whole_sqnr(twin, made.integer, made.unseen) >= by_chance


LARGE = ("resnet18", "mobilenet_v2")
"""On x86 and qnnpack at once; the tables of qnnpack and executorch lead to the same ops."""
pairs = pytest.mark.parametrize(
    ("subject", "backend"),
    [
        pytest.param(
            subject,
            backend,
            id=f"{subject.name}-{backend}",
            marks=[pytest.mark.slow] if subject.name in LARGE and backend == "executorch" else [],
        )
        for subject in SUBJECTS
        for backend in BACKENDS
    ],
)


@pairs
def test_every_op_agrees_with_qdq(subject: Subject, backend: str) -> None:
    made = forms(subject, backend)
    check_ops(agreement(made.qdq, made.integer, made.unseen))


@pairs
def test_whole_models_are_as_close_to_qdq_as_float32_allows(subject: Subject, backend: str) -> None:
    check_whole(forms(subject, backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("subject", FULL, ids=lambda subject: subject.name)
def test_full_size(subject: Subject, backend: str) -> None:
    made = forms(subject, backend)
    check_ops(agreement(made.qdq, made.integer, made.unseen))
    check_whole(made)


@pytest.mark.parametrize("backend", BACKENDS)
def test_digits_have_the_same_top_1(backend: str) -> None:
    made = forms(SUBJECTS[2], backend)
    batches = [images for images in torch.split(digits_data()[1].images, 32) if len(images) == 32]
    with torch.no_grad():
        same = [made.qdq(images).argmax(1) == made.integer(images).argmax(1) for images in batches]
    assert len(same) == 22
    assert float(torch.cat(same).double().mean()) >= 0.99
