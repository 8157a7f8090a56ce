"""The networks of the benchmark are those they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.bench.networks import (
    Attention,
    EfficientNetLite0,
    InvertedResidual,
    Layer,
    LiteBlock,
    MobileNetV2,
    Residual,
    Sequences,
    TextEncoder,
    Unit,
    ViT,
    mlp,
    resnet18,
)


def test_models_are_the_sizes_they_are_known_for() -> None:
    millions = {
        "resnet18": (resnet18(), 11.69),
        "mobilenetv2": (MobileNetV2(1000), 3.50),
        "efficientnet-lite0": (EfficientNetLite0(), 4.65),
        "vit-tiny": (ViT(), 5.72),
    }
    for name, (model, expected) in millions.items():
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e6 == pytest.approx(expected, abs=0.01), name


@pytest.mark.parametrize(
    ("model", "shape", "made"),
    [
        (Residual(4, 4), (2, 4, 8, 8), (2, 4, 8, 8)),
        (Residual(4, 6, 2), (2, 4, 8, 8), (2, 6, 4, 4)),
        (InvertedResidual(4, 4, 1, 6), (2, 4, 8, 8), (2, 4, 8, 8)),
        (InvertedResidual(4, 6, 2, 1), (2, 4, 8, 8), (2, 6, 4, 4)),
        (LiteBlock(5, 4, 4, 6, 1), (2, 4, 9, 9), (2, 4, 9, 9)),
        (LiteBlock(3, 4, 6, 1, 2), (2, 4, 8, 8), (2, 6, 4, 4)),
        (ViT(width=16, heads=2, depth=1, image=32), (2, 3, 32, 32), (2, 1000)),
        (Sequences(width=8), (2, 5, 8), (2, 5, 128)),
        (mlp(width=8), (2, 8), (2, 1000)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_blocks_yield_the_shapes_they_should(model: nn.Module, shape: tuple[int, ...], made: tuple[int, ...]) -> None:
    assert model.eval()(torch.randn(shape)).shape == made


@pytest.mark.parametrize("kind", [InvertedResidual, LiteBlock])
def test_a_shortcut_adds_what_goes_in(kind: Any) -> None:
    torch.manual_seed(0)
    block = (kind(4, 4, 1, 6) if kind is InvertedResidual else kind(3, 4, 4, 6, 1)).eval()
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(block(x), x)


def test_attention_in_separate_ops_is_torchs() -> None:
    torch.manual_seed(0)
    own, theirs = Attention(8, 2).eval(), nn.MultiheadAttention(8, 2, batch_first=True).eval()
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = own.qkv.weight.data, own.qkv.bias.data
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = own.out.weight.data, own.out.bias.data
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(own(x), theirs(x, x, x)[0])


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_layer_is_torchs_with_its_norms_before_or_after(norm_first: bool) -> None:
    torch.manual_seed(0)
    own = Layer(8, 2, norm_first).eval()
    theirs = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=norm_first).eval()
    theirs.self_attn.in_proj_weight.data = own.attention.qkv.weight.data
    theirs.self_attn.in_proj_bias.data = own.attention.qkv.bias.data
    theirs.self_attn.out_proj.load_state_dict(own.attention.out.state_dict())
    for name, part in (("linear1", own.up), ("linear2", own.down), ("norm1", own.norm1), ("norm2", own.norm2)):
        getattr(theirs, name).load_state_dict(part.state_dict())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(own(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_a_text_is_looked_up_and_placed() -> None:
    model = TextEncoder(width=8, heads=2, depth=0, length=3, words=10).eval()
    with torch.no_grad():
        model.position.copy_(torch.randn(3, 8))
    words = torch.tensor([[1, 1, 2]])
    wanted = model.norm(model.words.weight[words[0]] + model.position)
    assert torch.equal(model(words)[0], wanted)


def test_strided_units_pad_as_the_framework_they_were_trained_in() -> None:
    """As many results as half the size rounded up, with the odd row of padding at the end."""
    unit: Any = Unit(1, 1, 3, stride=2).eval()
    nn.init.zeros_(unit[1].weight)
    with torch.no_grad():
        unit[1].weight[0, 0, 2, 2] = 1.0  # the last tap alone
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    made = unit(x)[0, 0] * (1 + 1e-3) ** 0.5
    torch.testing.assert_close(made, torch.tensor([[10.0, 0.0], [0.0, 0.0]]))
