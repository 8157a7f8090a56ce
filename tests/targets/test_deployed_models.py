"""The networks that count, as `.pte` and as `.onnx`, run by the runtimes: op by op within a step of the Q/DQ form, as near to it
as exact arithmetic on integers is, the same answers, small, and on integers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tests.support.deployed_networks import NETWORKS, TAGS, TARGETS, Measured, fitted_tags, forms, measured

pytest.importorskip("executorch")
pytest.importorskip("onnxruntime")
STEP = 1.001
"""One step; dequantized numbers are floats."""
CLOSER = 10.0
"""dB by which a file is closer to the Q/DQ form than that is to the float model, where that can be."""
SLACK = 2.0
"""dB between two distances that are both the work of chance."""
SMALL = 0.3
SAME = 0.99
RANDOM = 0.97
"""For a head of random weights, whose answers lie closer together than quantizing moves them. Seen: 0.978 and 0.989; the exact
integer form has 0.982 and 0.989."""
CLEAR = 4.5
"""Answers that the Q/DQ form prefers by this many times what quantizing changes in a logit are the same everywhere."""
GROWN = {
    ("digits", "executorch"),
    ("resnet18", "executorch"),
    ("mobilenetv2", "executorch"),
    ("bert", "executorch"),
    ("bert", "onnx"),
    ("bert, dynamic", "executorch"),
    ("bert, dynamic", "onnx"),
    ("bert, random head", "executorch"),
    ("bert, random head", "onnx"),
    ("gpt", "executorch"),
    ("gpt, dynamic", "executorch"),
}
"""Where roundings that go the other way grow, so that a file is not 10 dB closer. A name may be taken out of here, and none added."""
ON_INTEGERS = {
    ("lstm tagger", "executorch"): 0.6,
    ("lstm tagger", "onnx"): 0.5,
    ("lstm tagger, dynamic", "onnx"): 0.5,
    ("lstm tagger, dynamic", "executorch"): 0.6,
}
"""The share of quantized ops that are computed on integers where it is less than 0.95: of three, the head and the table of words;
the state of a recurrent layer is float. ONNX Runtime does not count the table."""


def cases() -> Iterator[Any]:
    for name, network in NETWORKS.items():
        for target in TARGETS:
            is_slow = network.is_large or target == "executorch"  # which takes its time to lower
            yield pytest.param(name, target, marks=[pytest.mark.slow] if is_slow else [])


@cache
def found(name: str, target: str) -> Measured:
    return measured(forms(name, target))


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_every_op_is_within_a_step(name: str, target: str) -> None:
    row = found(name, target)
    assert row.steps <= STEP
    assert (row.ops > 0) == (NETWORKS[name].mode_for(target) == "static"), "run-time scales have no steps to be held to"


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_a_file_is_as_close_to_qdq_as_exact_integers_are(name: str, target: str) -> None:
    """10 dB closer than Q/DQ is to float, or as close as the integer form. Where few roundings that float32 turns over reach all of
    a deep network, nothing exact can be closer: `test_integer_models` holds Q/DQ in float64 to the same."""
    row = found(name, target)
    if (name, target) in GROWN:
        assert row.sqnr >= row.integer_sqnr - SLACK
    else:
        assert row.sqnr >= row.loss + CLOSER
    assert row.deployed_loss >= row.loss - 1, "as near the float model as the Q/DQ form"


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_answers_are_the_same(name: str, target: str) -> None:
    row = found(name, target)
    assert row.same >= (RANDOM if name == "bert, random head" else SAME)
    assert row.margin <= CLEAR


@pytest.mark.parametrize(("name", "target"), list(cases()))
def test_a_file_is_small_and_computes_on_integers(name: str, target: str) -> None:
    row = found(name, target)
    assert row.share >= ON_INTEGERS.get((name, target), 0.95)
    assert row.size <= SMALL


@torch.no_grad()
@pytest.mark.slow
def test_the_fitted_head_has_learned_its_tags() -> None:
    model, _, unseen = fitted_tags()
    right = [(model(*batch).argmax(-1) == batch[0] % TAGS).flatten() for batch in unseen]
    assert torch.cat(right).double().mean() >= 0.98
