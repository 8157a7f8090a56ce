"""Several quantizers one after another, each leaving alone what was annotated before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.flows.pt2e import (
    ComposableQuantizer,
    EmbeddingQuantizer,
    XNNPACKQuantizer,
    convert_pt2e,
    prepare_pt2e,
)
from tests.support.oracles import Batches, sqnr
from tests.support.pt2e_runs import quantized
from tests.support.pt2e_small import by_name


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Any:
        return self.fc(self.table(words))


def test_quantizers_compose() -> None:
    torch.manual_seed(0)
    model, words = Words().eval(), torch.randint(20, (3, 5))
    composed = ComposableQuantizer([EmbeddingQuantizer(), by_name("xnnpack")])
    exported: Any = torch.export.export(model, (words,)).module()
    prepared = prepare_pt2e(exported, composed)
    with torch.no_grad():
        prepared(words)
        converted = convert_pt2e(prepared)
        assert sqnr(model(words), converted(words)) > 30
    dtypes = {tensor.dtype for name, tensor in converted.named_buffers() if name.startswith("_frozen_param")}
    assert dtypes == {torch.uint8, torch.int8}
    assert len(composed.get_supported_operators()) == 1 + len(XNNPACKQuantizer.get_supported_operators())


def test_composing_with_a_quantizer_of_another_package() -> None:
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer as Theirs

    torch.manual_seed(0)
    model, words = Words().eval(), torch.randint(20, (3, 5))
    batches: Batches = [(words,)]
    ours = quantized(model, ComposableQuantizer([EmbeddingQuantizer(), by_name("xnnpack")]), batches)
    theirs = quantized(model, ComposableQuantizer([Theirs(), by_name("xnnpack")]), batches)
    with torch.no_grad():
        assert torch.equal(ours(*batches[0]), theirs(*batches[0]))


class Overwriting(EmbeddingQuantizer):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            node.meta.pop("quantization_annotation", None)
        return super().annotate(model)


def test_who_changes_what_another_said_is_named() -> None:
    exported: Any = torch.export.export(Words().eval(), (torch.randint(20, (3, 5)),)).module()
    with pytest.raises(RuntimeError, match="Overwriting changed the annotation of embedding"):
        prepare_pt2e(exported, ComposableQuantizer([by_name("xnnpack"), Overwriting()]))
