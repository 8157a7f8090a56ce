"""Attention of several heads whose four projections have quantized weights. torch leaves these in float."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.nn.attention import PROJECTIONS, HeadedAttention, projections_of
from quantc.nn.quantized.dynamic.modules.linear import Linear


class MultiheadAttention(HeadedAttention):
    """`nn.MultiheadAttention` with dynamic linear layers for queries, keys, values and results; called as that is."""

    _FLOAT_MODULE: ClassVar[Any] = nn.MultiheadAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        dtype: torch.dtype = torch.qint8,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        widths = (embed_dim, embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim)
        for name, width in zip(PROJECTIONS, widths, strict=True):
            self.add_module(name, Linear(width, embed_dim, bias, dtype))
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype)
        self.training = False

    @classmethod
    def from_float(cls, mod: nn.MultiheadAttention, use_precomputed_fake_quant: bool = False) -> Self:
        layers = projections_of(mod, f"{cls.__name__}.from_float")
        has_bias = layers["query"].bias is not None
        made = cls(mod.embed_dim, mod.num_heads, has_bias, mod.kdim, mod.vdim, mod.batch_first)
        made._modules.update({name: Linear.from_float(layer) for name, layer in layers.items()})
        return made

    def project(self, name: str, x: Tensor) -> Tensor:
        made: Tensor = self._modules[name](x)  # type: ignore[misc]
        return made

    def finish(self, seen: Tensor) -> Tensor:
        made: Tensor = self.out_proj(seen)
        return made

    def _get_name(self) -> str:
        return "DynamicQuantizedMultiheadAttention"


__all__ = ["MultiheadAttention"]
