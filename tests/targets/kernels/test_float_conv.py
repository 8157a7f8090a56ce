"""Int8 convolutions computed in float32: exact sums for float results, and one rounding for bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantc.targets.kernels.float_conv import ConvFloat, in_float
from quantc.targets.kernels.kernel_table import NoKernelError
from tests.support.byte_convs import FLOAT, FULL, NARROW, RELU, Layer, close, plain


def kernel_of(layer: Layer, x: Tensor) -> ConvFloat:
    made = in_float(layer.call(x))
    assert isinstance(made, ConvFloat)
    return made


@pytest.mark.parametrize("out", [FULL, RELU, NARROW, FLOAT], ids=["all", "relu", "narrow", "float"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero_points", [0, 120])
def test_it_is_torchs_convolution_in_float64(out: tuple[object, ...], bias: bool, zero_points: int) -> None:
    layer = plain(out, bias=bias, zero_points=zero_points)
    x = layer.input(2, 4, 6, 5)
    kernel = kernel_of(layer, x)
    close(kernel(x), layer.expected(x), kernel.name)


@pytest.mark.parametrize("axes", [1, 3])
def test_rows_and_volumes(axes: int) -> None:
    layer = Layer("conv", (4, 3, *[2] * axes), ([1] * axes, [1] * axes, [1] * axes, 1), FULL)
    x = layer.input(2, 3, *[5] * axes)
    close(kernel_of(layer, x)(x), layer.expected(x), f"{axes} axes")


def test_float_results_are_exact_up_to_the_multiplier() -> None:
    layer = Layer("conv", (3, 2, 1, 1), ([1, 1], [0, 0], [1, 1], 1), FLOAT, bias=False, factor=1.0)
    x = layer.input(1, 2, 3, 3)
    _, weight, *_, multiplier, _, _, _, _, _ = layer.arguments()
    sums = torch.einsum("nchw,oc->nohw", x.long() - layer.x_zero_point, weight.flatten(1).long())
    assert torch.equal(kernel_of(layer, x)(x), sums.float() * multiplier.float())


def test_it_is_offered_only_where_float_is_allowed() -> None:
    layer = plain()
    assert kernel_of(layer, layer.input(2, 4, 6, 5)).computes_in_float


def test_sums_beyond_what_float32_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_arguments = Layer.arguments
    monkeypatch.setattr(Layer, "arguments", lambda self: (*plain_arguments(self)[:8], 2, *plain_arguments(self)[9:]))
    layer = plain(FLOAT)
    assert layer.arguments()[8] == 2
    with pytest.raises(NoKernelError, match="float32 holds"):
        in_float(layer.call(layer.input(2, 4, 6, 5)))
