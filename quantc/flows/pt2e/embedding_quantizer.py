"""`EmbeddingQuantizer`: tables of embeddings stored in bytes, with a scale and a float zero point for each row."""

from __future__ import annotations

import torch
from torch import fx

from quantc.errors import AnnotationError
from quantc.flows.pt2e.quantizer import (
    Q_ANNOTATION_KEY,
    OperatorConfig,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    Quantizer,
)
from quantc.nn.observers import PerChannelMinMaxObserver

EMBEDDING = torch.ops.aten.embedding.default


def get_embedding_operators_config() -> OperatorConfig:
    """The config of an embedding, and the spellings it is for."""
    weight = QuantizationSpec(
        dtype=torch.uint8,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
        qscheme=torch.per_channel_affine_float_qparams,
        ch_axis=0,
    )
    config = QuantizationConfig(None, None, weight, None)
    return OperatorConfig(config, [[torch.nn.Embedding], [torch.nn.functional.embedding]])


class EmbeddingQuantizer(Quantizer):
    """Quantizes embeddings, and nothing else."""

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        weight = get_embedding_operators_config().config.weight
        for node in model.graph.find_nodes(op="call_function", target=EMBEDDING):
            if Q_ANNOTATION_KEY not in node.meta:
                table: fx.Node = node.args[0]
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation({table: weight}, _annotated=True)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Tables must be constants: a computed one has no rows to store."""
        for node in model.graph.find_nodes(op="call_function", target=EMBEDDING):
            table = node.args[0]
            if isinstance(table, fx.Node) and table.op != "get_attr":
                raise AnnotationError(
                    f"{node.name} looks up rows of {table.name}, which is computed",
                    where=node.format_node(),
                    advice="leave it float: annotate it yourself, with an empty QuantizationAnnotation",
                )

    @classmethod
    def get_supported_operators(cls) -> list[OperatorConfig]:
        return [get_embedding_operators_config()]


__all__ = ["EmbeddingQuantizer", "get_embedding_operators_config"]
