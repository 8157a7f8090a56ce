"""Tables of embeddings stored in bytes, with a scale and a float zero point for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer as Theirs

from quantc.errors import AnnotationError
from quantc.flows.pt2e import QuantizationAnnotation
from quantc.flows.pt2e.embedding_quantizer import EMBEDDING, EmbeddingQuantizer, get_embedding_operators_config
from tests.support.pt2e_quantizers import converted, count, exported

IDS = (torch.tensor([[0, 3], [2, 1]]),)


def tables() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 2)).eval()


def test_the_result_is_that_of_torchaos_quantizer() -> None:
    model = tables()
    ours, theirs = (converted(model, IDS, quantizer) for quantizer in (EmbeddingQuantizer(), Theirs()))
    assert count(ours, "dequantize_per_channel.default") == 1
    assert torch.equal(ours(*IDS), theirs(*IDS))


def test_rows_are_near_those_of_the_table() -> None:
    model: Any = tables()
    made = converted(model, IDS, EmbeddingQuantizer())
    table = model[0].weight.detach()
    steps = (table.amax(1).clamp(min=0) - table.amin(1).clamp(max=0)) / 255
    rows = next(node for node in made.graph.nodes if node.target is EMBEDDING)
    levels, scale, zero_point = (getattr(made, str(read.target)) for read in rows.args[0].all_input_nodes)
    assert levels.dtype is torch.uint8
    again = (levels.float() - zero_point[:, None]) * scale[:, None]
    assert bool(((again - table).abs() <= 1.51 * steps[:, None]).all())  # the op rounds zero points, which are floats


def test_nothing_else_is_annotated() -> None:
    model = EmbeddingQuantizer().annotate(exported(tables(), IDS))
    annotated = [node.target for node in model.graph.nodes if "quantization_annotation" in node.meta]
    assert annotated == [EMBEDDING]


def test_what_others_annotated_is_left_alone() -> None:
    model = exported(tables(), IDS)
    (node,) = (node for node in model.graph.nodes if node.target is EMBEDDING)
    node.meta["quantization_annotation"] = mine = QuantizationAnnotation()
    EmbeddingQuantizer().annotate(model)
    assert node.meta["quantization_annotation"] is mine


def test_a_table_that_is_computed_is_refused() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 8))

        def forward(self, ids: Tensor) -> Any:
            return nn.functional.embedding(ids, self.w * 2)

    model = exported(Computed(), IDS)
    with pytest.raises(AnnotationError, match="mul") as caught:
        EmbeddingQuantizer().validate(model)
    assert "embedding" in str(caught.value.where)


def test_the_config_says_what_it_is_for() -> None:
    config = get_embedding_operators_config()
    assert config.operators == [[nn.Embedding], [nn.functional.embedding]]
    weight: Any = config.config.weight
    assert (weight.dtype, weight.qscheme, weight.ch_axis) == (
        torch.uint8,
        torch.per_channel_affine_float_qparams,
        0,
    )
    assert EmbeddingQuantizer.get_supported_operators() == [config]
