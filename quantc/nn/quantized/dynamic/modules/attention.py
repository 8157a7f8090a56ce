"""Attention of several heads whose four projections have quantized weights. torch leaves these in float."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import InputError, SpecError
from quantc.nn.quantized.dynamic.modules.linear import Linear

PROJECTIONS = ("query", "key", "value")


class MultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` with dynamic linear layers for queries, keys, values and results; called as that is."""

    _FLOAT_MODULE: ClassVar[Any] = nn.MultiheadAttention
    in_proj_bias = None  # encoder layers look here whether they may read float weights
    _qkv_same_embed_dim = False

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
        if mod.bias_k is not None or mod.add_zero_attn:
            raise SpecError(
                "attention with keys and values of its own (add_bias_kv, add_zero_attn) has no quantized form",
                where=f"{cls.__name__}.from_float",
                advice="leave it float: give it the qconfig None",
            )
        source: Any = mod  # whose types have tensors where there may be none
        whole, bias = source.in_proj_weight, source.in_proj_bias
        made = cls(mod.embed_dim, mod.num_heads, bias is not None, mod.kdim, mod.vdim, mod.batch_first)
        qconfig = getattr(mod, "qconfig", None)
        apart = (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight)
        weights = apart if whole is None else whole.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        for name, weight, own in zip(PROJECTIONS, weights, biases, strict=True):
            made._modules[name] = Linear.from_float(_linear(weight, own, qconfig))
        made.out_proj = Linear.from_float(_linear(mod.out_proj.weight, mod.out_proj.bias, qconfig))
        return made

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise InputError("is_causal needs attn_mask, which it is a hint about", advice="give the mask too")
        batch = None if query.dim() == 2 else 0 if self.batch_first else 1
        q, k, v = (
            self._heads(name, x, batch) for name, x in zip(PROJECTIONS, (query, key, value), strict=True)
        )  # fmt: skip
        mask = self._mask(q, k, attn_mask, key_padding_mask)
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            seen = weights @ v
            shown = weights.mean(1) if average_attn_weights else weights
            shown = shown.squeeze(0) if batch is None else shown
        else:
            seen, shown = functional.scaled_dot_product_attention(q, k, v, mask), None
        joined: Tensor = self.out_proj(seen.transpose(1, 2).flatten(2))
        return (joined.squeeze(0) if batch is None else joined.transpose(0, batch)), shown

    def _heads(self, name: str, x: Tensor, batch: int | None) -> Tensor:
        """A projection, as (batch, heads, places, width)."""
        whole = x.unsqueeze(0) if batch is None else x.transpose(0, batch)
        made: Tensor = self._modules[name](whole)  # type: ignore[misc]
        return made.reshape(*made.shape[:-1], self.num_heads, -1).transpose(1, 2)

    def _mask(self, q: Tensor, k: Tensor, seen: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """What is added to the scores."""
        parts = []
        if seen is not None:
            parts.append(_added(seen, q).reshape(-1 if seen.dim() == 3 else 1, *self._of_heads(seen), *seen.shape[-2:]))
        if padding is not None:
            parts.append(_added(padding, q).reshape(-1, 1, 1, k.shape[-2]))
        return sum(parts[1:], parts[0]) if parts else None

    def _of_heads(self, mask: Tensor) -> tuple[int, ...]:
        return (self.num_heads,) if mask.dim() == 3 else (1,)

    def _get_name(self) -> str:
        return "DynamicQuantizedMultiheadAttention"

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers: true is minus infinity."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill_(mask, float("-inf"))


def _linear(weight: Tensor, bias: Tensor | None, qconfig: Any) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    vars(made)["qconfig"] = qconfig
    return made


__all__ = ["MultiheadAttention"]
