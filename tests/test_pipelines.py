"""The named pipelines: which passes they hold, in which order, and what their options change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc import pipelines
from quantc.errors import QuantcError
from quantc.pipeline.pipeline import Pipeline
from quantc.pipeline.registry import PIPELINES


def names(pipeline: Pipeline) -> list[str]:
    return [step.name for step in pipeline.passes]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()).eval()


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def test_tidying_for_inference_keeps_the_numbers_and_leaves_neither_norm_nor_dropout() -> None:
    program = qc.capture(model(), (X,))
    tidy = pipelines.inference().run_on_copy(program)
    ops = [str(node.target) for node in tidy.graph.nodes]
    assert not any("batch_norm" in op or "dropout" in op for op in ops)
    torch.testing.assert_close(tidy(X), program(X), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_preparing_is_tidying_and_deciding(backend: str) -> None:
    found = names(pipelines.prepare(backend))
    tidy = names(pipelines.inference())
    assert found[: len(tidy)] == tidy
    assert found[-2:] == ["annotate", "share"]


def test_training_keeps_dropout_and_norms_and_ends_in_fake_quantizers() -> None:
    found = names(pipelines.training("x86"))
    assert "strip-dropout" not in found
    assert "fuse" not in found
    assert found[-1] == "insert-fake-quantize"
    assert found.index("detach-norms") < found.index("annotate") < found.index("share")
    assert all(step.parameters == "keep" for step in _every(pipelines.training("x86"), "fold-constants"))


def _every(pipeline: Pipeline, name: str) -> list[Any]:
    return [step for step in pipeline.passes if step.name == name]


def test_options_reach_the_pass_they_are_for() -> None:
    config = qc.QuantConfig().set_all(qc.FLOAT)
    (annotate,) = _every(pipelines.prepare("x86", config, allow_empty=True), "annotate")
    assert annotate.config == config
    assert annotate.allow_empty
    (quantize,) = _every(pipelines.convert("x86", "weights"), "quantize")
    assert quantize.reduce_range == "weights"
    (lowered,) = _every(pipelines.integer("fixed"), "lower-integer")
    assert lowered.multiplier == "fixed"


def test_the_decomposed_style_is_one_pass_more() -> None:
    fused, decomposed = names(pipelines.integer()), names(pipelines.integer(style="decomposed"))
    assert [name for name in decomposed if name not in fused] == ["decompose-integer"]
    assert decomposed[0] == "lower-integer"
    assert decomposed[-1] == "eliminate-dead"


def test_converting_ends_in_a_proof() -> None:
    assert names(pipelines.convert())[:3] == ["quantize", "dedup-qdq", "fold"]
    for backend in (None, "x86", "qnnpack", "executorch"):
        assert names(pipelines.convert(backend))[-1] == "prove-accumulators"


def test_lowering_leaves_quantize_ops_whole() -> None:
    (lowered,) = _every(pipelines.lower(), "lower-integer")
    assert (lowered.boundaries, lowered.curves) == ("whole", "float")
    assert names(pipelines.lower())[0] == "lower-weights"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: pipelines.convert(reduce_range="weightz"), "weights"),  # type: ignore[arg-type]
        (lambda: pipelines.integer("float46"), "float64"),  # type: ignore[arg-type]
        (lambda: pipelines.integer(style="fusd"), "fused"),  # type: ignore[arg-type]
    ],
)
def test_values_that_do_not_exist_are_refused_with_the_nearest(make: Any, word: str) -> None:
    with pytest.raises(QuantcError) as caught:
        make()
    assert word in str(caught.value.advice)
    assert caught.value.where


def test_pipelines_are_known_to_text_by_their_names() -> None:
    assert {"convert", "inference", "integer", "prepare", "training"} <= set(PIPELINES)
    assert names(Pipeline.parse("inference")) == names(pipelines.inference())
    assert names(Pipeline.parse("integer{style=decomposed}")) == names(pipelines.integer(style="decomposed"))
