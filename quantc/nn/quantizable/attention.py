"""Attention whose projections can be quantized statically; what is between them is computed in float."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor, nn

from quantc.nn.attention import PROJECTIONS, HeadedAttention, projections_of

LINEARS: dict[str, str] = dict(zip(PROJECTIONS, ("linear_Q", "linear_K", "linear_V"), strict=True))


class MultiheadAttention(HeadedAttention):
    """`nn.MultiheadAttention`, observed: reads quantized tensors once it is converted, and yields them."""

    _FLOAT_MODULE: ClassVar[Any] = nn.MultiheadAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
    ) -> None:
        from quantc.nn.stubs import DeQuantStub, QuantStub

        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first, self.dropout = embed_dim, num_heads, batch_first, dropout
        widths = (embed_dim, embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim)
        for name, width in zip(LINEARS.values(), widths, strict=True):
            self.add_module(name, nn.Linear(width, embed_dim, bias))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.dequant = nn.ModuleDict({name: DeQuantStub() for name in PROJECTIONS})
        self.quant_attn_output = QuantStub()

    @classmethod
    def from_float(cls, other: nn.MultiheadAttention) -> Self:
        layers = projections_of(other, f"{cls.__name__}.from_float")
        has_bias = layers["query"].bias is not None
        made = cls(other.embed_dim, other.num_heads, other.dropout, has_bias, other.kdim, other.vdim, other.batch_first)
        made._modules.update({LINEARS.get(name, name): layer for name, layer in layers.items()})
        return made.train(other.training)

    def project(self, name: str, x: Tensor) -> Tensor:
        made: Tensor = self.dequant[name](self._modules[LINEARS[name]](x))  # type: ignore[misc]
        return made

    def finish(self, seen: Tensor) -> Tensor:
        made: Tensor = self.out_proj(self.quant_attn_output(seen))
        return made


__all__ = ["MultiheadAttention"]
