"""Folding of an affine map into the layer before it: in float64, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.rewrite.affine_folding import Affine, Channels, affine_of_norm, fold_affine
from tests.support.programs import Builder, aten

LAYERS: dict[str, tuple[Any, Channels, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 4), Channels(), (5, 6)),
    "conv2d in groups": (nn.Conv2d(6, 4, 3, groups=2), Channels(), (2, 6, 5, 5)),
    "conv_transpose1d": (nn.ConvTranspose1d(6, 4, 3), Channels(True), (2, 6, 5)),
    "conv_transpose2d in groups": (nn.ConvTranspose2d(6, 4, 3, groups=2), Channels(True, 2), (2, 6, 5, 5)),
}


def norm_for(channels: int, rank: int) -> nn.Module:
    """A batch norm in eval mode whose statistics and weights are all different."""
    norm = (nn.BatchNorm1d if rank < 4 else nn.BatchNorm2d)(channels, eps=0.1).double().eval()
    for index, tensor in enumerate((norm.weight, norm.bias, norm.running_mean, norm.running_var)):
        assert tensor is not None
        tensor.data.copy_(torch.arange(channels) * 0.5 + 0.3 + index)
    return norm


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_folded_layer_is_the_layer_and_its_norm(name: str) -> None:
    torch.manual_seed(0)
    layer, channels, shape = LAYERS[name]
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64)
    norm: Any = norm_for(4, len(shape))
    expected = norm(layer(x))
    affine = affine_of_norm(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps, 4)
    state = layer.state_dict()
    assert channels.count(state["weight"]) == 4
    layer.weight.data, layer.bias.data = fold_affine(state["weight"], state["bias"], affine, channels)
    torch.testing.assert_close(layer(x), expected)


def test_what_a_norm_lacks_is_one_or_zero() -> None:
    var = torch.tensor([3.0, 15.0])
    affine = affine_of_norm(None, None, None, var, 1.0, 2)
    assert affine.scale.tolist() == [0.5, 0.25]
    assert affine.shift.tolist() == [0.0, 0.0]
    moved = affine_of_norm(None, torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0]), None, 0.0, 2)
    assert moved.shift.tolist() == [-1.0, -3.0]


def test_a_layer_without_bias_gets_the_shift() -> None:
    weight, bias = fold_affine(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        None,
        Affine(torch.tensor([2.0, 10.0], dtype=torch.float64), torch.tensor([0.5, -1.0], dtype=torch.float64)),
        Channels(),
    )
    assert weight.tolist() == [[2.0, 4.0], [30.0, 40.0]]
    assert bias.tolist() == [0.5, -1.0]


def test_weights_are_rounded_once() -> None:
    third = torch.tensor([[1 / 3]], dtype=torch.float32)
    scale = torch.tensor([1 + 2.0**-30], dtype=torch.float64)
    weight, bias = fold_affine(third, torch.ones(1), Affine(scale, -torch.ones(1, dtype=torch.float64)), Channels())
    assert weight.dtype is bias.dtype is torch.float32
    assert bias.item() == 2.0**-30, "in float32 the sum would be zero"


def channels_of(target: Any, weight: Tensor, *args: Any) -> Channels:
    build = Builder()
    x = build.input("x", 2, 6, *[5] * (weight.dim() - 2))
    return Channels.of(build.call(target, x, build.constant("w", weight), *args))


def test_the_layout_is_read_off_the_layer() -> None:
    assert channels_of(aten.linear.default, torch.ones(4, 6)) == Channels()
    assert channels_of(aten.conv2d.default, torch.ones(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], 2) == Channels()
    transposed = channels_of(
        aten.conv_transpose2d.input, torch.ones(6, 2, 3, 3), None, [1, 1], [0, 0], [0, 0], 2, [1, 1]
    )
    assert transposed == Channels(True, 2)
