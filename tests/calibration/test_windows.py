"""Patches of convolutions, forwards and transposed: times the weight they are what torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.backends.x86 import X86
from quantc.calibration.layer_inputs import layer_inputs
from quantc.calibration.windows import TransposedWindow, Window
from tests.support.layer_inputs import prepared_layer

TRANSPOSED: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.ConvTranspose1d(4, 6, 3, bias=False), (2, 4, 7)),
    (nn.ConvTranspose1d(4, 6, 4, stride=3, padding=2, output_padding=1, groups=2, bias=False), (2, 4, 5)),
    (nn.ConvTranspose2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), bias=False), (2, 3, 4, 5)),
    (nn.ConvTranspose2d(4, 4, 2, stride=2, groups=4, bias=False), (1, 4, 3, 3)),
    (nn.ConvTranspose2d(2, 3, 1, padding=0, stride=2, output_padding=1, bias=False), (1, 2, 3, 3)),
    (nn.ConvTranspose2d(2, 3, 3, padding=2, bias=False), (1, 2, 6, 5)),
    (nn.ConvTranspose3d(2, 4, 2, stride=2, groups=2, bias=False), (1, 2, 2, 3, 2)),
]


@pytest.mark.parametrize(("layer", "shape"), TRANSPOSED, ids=str)
def test_mirrored_patches_times_the_weight_are_the_transposed_convolution(layer: Any, shape: tuple[int, ...]) -> None:
    (rows,) = layer_inputs(prepared_layer(layer, shape, X86))
    x = torch.randn(shape)
    weight = rows.by_output(layer.weight.detach())
    assert weight.shape == (rows.groups, rows.outputs, rows.width)
    found = (rows.rows(x, 0) @ weight.mT).permute(1, 0, 2).flatten(1)
    expected = layer(x).detach().flip([*range(2, x.dim())]).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(rows.as_weight(weight, layer.weight.shape), layer.weight)


def test_names_tell_windows_apart() -> None:
    plain = Window((3, 3), (2, 2), (1, 1), (1, 1), 4)
    turned = TransposedWindow((3, 3), (2, 2), (1, 1), (1, 1), 4, (0, 1))
    assert str(plain) == "window 3x3 stride 2x2 padding 1x1 groups 4"
    assert str(turned) == "transposed window 3x3 stride 2x2 padding 1x1 groups 4 more 0x1"
    assert plain != turned
