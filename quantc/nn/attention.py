"""Multi-head attention between its projections, in float: shared by all forms of the module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import InputError, SpecError


class HeadedAttention(nn.Module):
    """Called as `nn.MultiheadAttention` is. Kinds of it say how queries, keys and values are projected, and the result."""

    embed_dim: int
    num_heads: int
    batch_first: bool
    in_proj_bias = None  # encoder layers look here whether they may read float weights
    _qkv_same_embed_dim = False

    def project(self, name: str, x: Tensor) -> Tensor:
        """`query`, `key` or `value`, as floats."""
        raise NotImplementedError

    def finish(self, seen: Tensor) -> Tensor:
        """The result, of the values that the heads have seen."""
        raise NotImplementedError

    def show(self, weights: Tensor) -> Tensor:
        """The weights of attention, for the caller."""
        return weights

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
        shown: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            seen = weights @ v
            shown = weights.mean(1) if average_attn_weights else weights
            shown = self.show(shown.squeeze(0) if batch is None else shown)
        else:
            seen = functional.scaled_dot_product_attention(q, k, v, mask)
        joined = self.finish(seen.transpose(1, 2).flatten(2))
        return (joined.squeeze(0) if batch is None else joined.transpose(0, batch)), shown

    def _heads(self, name: str, x: Tensor, batch: int | None) -> Tensor:
        """A projection, as (batch, heads, places, width)."""
        made = self.project(name, x.unsqueeze(0) if batch is None else x.transpose(0, batch))
        return made.reshape(*made.shape[:-1], self.num_heads, -1).transpose(1, 2)

    def _mask(self, q: Tensor, k: Tensor, seen: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """The additive mask of the scores; None without masks."""
        parts = []
        if seen is not None:
            heads = self.num_heads if seen.dim() == 3 else 1
            parts.append(_as_addend(seen, q).reshape(-1 if seen.dim() == 3 else 1, heads, *seen.shape[-2:]))
        if padding is not None:
            parts.append(_as_addend(padding, q).reshape(-1, 1, 1, k.shape[-2]))
        return sum(parts[1:], parts[0]) if parts else None

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


PROJECTIONS = ("query", "key", "value")


def _as_addend(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers: true is minus infinity."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill_(mask, float("-inf"))


def projections_of(mod: nn.MultiheadAttention, where: str) -> dict[str, nn.Linear]:
    """The four projections of a float module as linear layers, by name, with its qconfig."""
    if mod.bias_k is not None or mod.add_zero_attn:
        raise SpecError(
            "attention with keys and values of its own (add_bias_kv, add_zero_attn) has no quantized form",
            where=where,
            advice="leave it float: give it the qconfig None",
        )
    source: Any = mod  # whose types have tensors where there may be none
    whole, bias, qconfig = source.in_proj_weight, source.in_proj_bias, getattr(mod, "qconfig", None)
    apart = (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight)
    weights = apart if whole is None else whole.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    made = {name: _linear(weight, own, qconfig) for name, weight, own in zip(PROJECTIONS, weights, biases, strict=True)}
    return {**made, "out_proj": _linear(mod.out_proj.weight, mod.out_proj.bias, qconfig)}


def _linear(weight: Tensor, bias: Tensor | None, qconfig: Any) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    vars(made)["qconfig"] = qconfig
    return made
