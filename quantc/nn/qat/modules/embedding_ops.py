"""Tables of embeddings for quantization aware training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import SpecError
from quantc.nn.qat_module import Trained
from quantc.spec.torch_dtypes import FLOAT_QPARAMS


class _TrainedTable(Trained):
    """A table has no bias, and zero points that are floats."""

    bias = None

    def set_up(self, **own: Any) -> None:
        if self.weight_fake_quant.qscheme != FLOAT_QPARAMS:
            raise SpecError(
                f"tables of embeddings have float zero points, and the fake quantizer is for {self.weight_fake_quant.qscheme}",
                advice="use default_embedding_qat_qconfig",
            )


class Embedding(_TrainedTable, nn.Embedding):
    def product(self, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        settings = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return functional.embedding(x, weight, *settings)


class EmbeddingBag(_TrainedTable, nn.EmbeddingBag):
    def product(
        self, x: Tensor, weight: Tensor, bias: Any, offsets: Any = None, per_sample_weights: Any = None
    ) -> Tensor:
        return functional.embedding_bag(
            x,
            weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )


__all__ = ["Embedding", "EmbeddingBag"]
