"""What attention computes between its projections is what `nn.MultiheadAttention` computes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import InputError, SpecError
from quantc.nn.attention import HeadedAttention, projections_of


class Plain(HeadedAttention):
    """One whose projections are the float layers themselves."""

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = source.embed_dim, source.num_heads, source.batch_first
        self.layers = projections_of(source, "here")

    def project(self, name: str, x: Tensor) -> Tensor:
        made: Tensor = self.layers[name](x)
        return made

    def finish(self, seen: Tensor) -> Tensor:
        made: Tensor = self.layers["out_proj"](seen)
        return made


def pair(**settings: Any) -> tuple[Plain, nn.MultiheadAttention]:
    torch.manual_seed(0)
    source = nn.MultiheadAttention(8, 2, **settings).eval()
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.4)  # biases are zero otherwise
    return Plain(source), source


def check(ours: Plain, theirs: nn.MultiheadAttention, *given: Tensor, **options: Any) -> None:
    with torch.no_grad():
        (found, weights), (wanted, their_weights) = ours(*given, **options), theirs(*given, **options)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (weights is None) == (their_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, their_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_batches_of_sequences(batch_first: bool, bias: bool) -> None:
    ours, theirs = pair(batch_first=batch_first, bias=bias)
    query, key = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        check(ours, theirs, query, key, key, **options)


def test_one_sequence_alone() -> None:
    ours, theirs = pair()
    query, key = torch.randn(5, 8), torch.randn(4, 8)
    for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        check(ours, theirs, query, key, key, **options)


def test_keys_and_values_of_other_widths() -> None:
    ours, theirs = pair(kdim=3, vdim=6, batch_first=True)
    check(ours, theirs, torch.randn(2, 5, 8), torch.randn(2, 4, 3), torch.randn(2, 4, 6))


@pytest.mark.parametrize("need_weights", [True, False])
def test_masks_hide_what_they_hide_from_torch(need_weights: bool) -> None:
    ours, theirs = pair(batch_first=True)
    query, key = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    seen = torch.ones(5, 4, dtype=torch.bool).triu(2)
    padding = torch.tensor([[False, False, False, True], [False] * 4, [False, True, True, True]])
    for options in (
        {"attn_mask": seen},
        {"attn_mask": torch.randn(5, 4)},
        {"attn_mask": torch.randn(6, 5, 4)},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "attn_mask": seen},
    ):
        check(ours, theirs, query, key, key, need_weights=need_weights, **options)


def test_a_causal_hint_without_its_mask_is_refused() -> None:
    ours, _ = pair()
    x = torch.randn(5, 8)
    with pytest.raises(InputError, match="attn_mask"):
        ours(x, x, x, is_causal=True)


@pytest.mark.parametrize("own", ["add_bias_kv", "add_zero_attn"])
def test_keys_and_values_of_its_own_are_refused(own: str) -> None:
    with pytest.raises(SpecError, match=own) as caught:
        projections_of(nn.MultiheadAttention(8, 2, **{own: True}), "encoder.attention")
    assert caught.value.where == "encoder.attention"


def test_projections_share_the_weights_and_the_qconfig_of_the_module() -> None:
    source = nn.MultiheadAttention(8, 2)
    vars(source)["qconfig"] = "its config"
    layers = projections_of(source, "here")
    assert {name: getattr(layer, "qconfig", None) for name, layer in layers.items()} == dict.fromkeys(
        ["query", "key", "value", "out_proj"], "its config"
    )
    assert layers["key"].weight.data_ptr() == source.in_proj_weight[8:16].data_ptr()
    assert not any(parameter.requires_grad for layer in layers.values() for parameter in layer.parameters())
