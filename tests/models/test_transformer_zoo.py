"""Transforms on architectures of the `transformers` package, of which none is known by name: exact in float, and every place
that a product reads is rotated or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import quantc as qc
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program
from quantc.passes.rotate import Rotate
from quantc.pipeline.base_pass import Preserves
from quantc.pipeline.pipeline import Pipeline
from quantc.pipeline.tolerance import Tolerance, gap
from tests.support.transformer_zoo import HIDDEN, ZOO, Architecture

QUICK = ("Gemma", "GPT2", "ViT")
LEAST = 45
WHOLE = f"vectors of {HIDDEN}"
"""A residual stream that is rotated."""
UNTURNED = {
    **dict.fromkeys(
        [
            "Bert",
            "Roberta",
            "Electra",
            "XLMRoberta",
            "Camembert",
            "RoFormer",
            "Ernie",
            "Albert",
            "DistilBert",
            "Deberta",
            "DebertaV2",
            "ModernBert",
            "MPNet",
            "Bart",
            "MBart",
            "Marian",
            "Olmo2",
            "Exaone4",
            "Gemma2",
            "Gemma3",
            "Bloom",
            "CLIPVision",
        ],
        "has a gain, and",
    ),
    **dict.fromkeys(["Wav2Vec2", "Hubert", "ConvNext"], "reads vectors that do not lie along its channels"),
    "SiglipVision": "is a result of the program",
}
"""Residual streams that are not rotated, with the reason: a norm after the sum, or before the first block, whose gain is in
the stream; grouped convolutions of it; results of the model."""


@contextmanager
def captured(each: Architecture) -> Iterator[tuple[Program, torch.Tensor]]:
    model, inputs = each.model(), each.inputs()
    with torch.no_grad():
        expected = model(*inputs)
    program = qc.capture(model, inputs, dynamic_shapes=None)
    yield qc.pipelines.inference().run_on_copy(program), expected


def rotated(each: Architecture) -> list[Judgment]:
    """Rotate; the program must compute what the model does."""
    with captured(each) as (program, expected):
        Pipeline((Rotate(tied="untie"),)).run(program)
        with torch.no_grad():
            found = program(*each.inputs())
    assert gap(expected, found, Preserves.CLOSELY, Tolerance()) is None, each.family
    return list(program.log[-1].judgments)


def check(each: Architecture) -> None:
    judgments = rotated(each)
    assert judgments, each.family
    assert not [judgment for judgment in judgments if judgment.fate == "undone"], each.family
    assert all(judgment.reason for judgment in judgments)
    kept = [judgment.reason for judgment in judgments if judgment.fate == "kept"]
    refused = [judgment.reason for judgment in judgments if judgment.fate == "refused"]
    is_whole = any(reason.startswith(WHOLE) for reason in kept)
    assert is_whole == (each.family not in UNTURNED), (each.family, kept, refused)
    assert is_whole or any(UNTURNED[each.family] in reason for reason in refused), (each.family, refused)


@pytest.mark.parametrize("each", [each for each in ZOO if each.family in QUICK], ids=lambda each: each.family)
def test_streams_of_three_kinds(each: Architecture) -> None:
    """A gain of 1 + w with shared keys, a joint projection with a transposed weight, and an encoder of images."""
    check(each)


@pytest.mark.slow
@pytest.mark.parametrize("each", [each for each in ZOO if each.family not in QUICK], ids=lambda each: each.family)
def test_streams_of_every_architecture(each: Architecture) -> None:
    check(each)


def test_there_are_enough() -> None:
    assert len({each.family for each in ZOO}) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("each", ZOO, ids=lambda each: each.family)
def test_smoothing_keeps_every_architecture_exact(each: Architecture) -> None:
    """Groups of channels are scaled by any factor, or refused with the reason."""
    with captured(each) as (program, expected):
        prepared = qc.prepare(program, "x86", allow_empty=True)
        batches = [each.inputs()] * 2
        qc.calibrate(prepared, batches, collect="gram,extremes")
        better = qc.recover(prepared, "smooth{factors=any}", batches=batches)
        with torch.no_grad():
            found = better(*each.inputs())
    assert gap(expected, found, Preserves.CLOSELY, Tolerance()) is None, each.family
    judgments = [judgment for entry in better.log for judgment in entry.judgments]
    assert judgments, each.family
    assert all(judgment.reason for judgment in judgments if judgment.fate != "kept")
