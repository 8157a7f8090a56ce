"""What int8 convolutions have in common on every engine: ranks, memory formats, workloads, and the checks before they are taken."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import InputError
from quantc.targets.kernels.float_conv import ConvFloat
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_conv_base import check_bytes, symmetric, two_axes
from quantc.targets.kernels.kernel_table import NoKernelError
from tests.support.byte_convs import FULL, Layer, close, plain


def test_single_items_and_wrong_ranks() -> None:
    layer = plain()
    x = layer.input(2, 4, 6, 5)
    for kernel in layer.kernels(x)[0]:
        assert torch.equal(kernel(x[0]), kernel(x)[0])
        with pytest.raises(InputError, match="goes over 2 axes"):
            kernel(x[0, 0])


def test_results_lie_in_order_unless_nobody_asks() -> None:
    layer = plain()
    x = layer.input(2, 4, 6, 5)
    for kernel in layer.kernels(x)[0]:
        assert kernel(x).is_contiguous()
        kernel.in_order = False
        assert kernel(x).is_contiguous(memory_format=torch.channels_last)
        close(kernel(x), layer.expected(x), kernel.name)


def test_what_they_have_to_do_is_named() -> None:
    def work(layer: Layer, *shape: int) -> str:
        kernels, _ = layer.kernels(layer.input(*shape))
        assert len({str(kernel.work(layer.input(*shape))) for kernel in kernels}) == 1
        return str(kernels[0].work(layer.input(*shape)))

    assert work(plain(), 2, 4, 6, 5) == "conv2d 3x3 s1, 60 × 4→6, padding [1, 1]"
    depthwise = Layer("conv", (8, 1, 3, 3), ([2, 2], [1, 1], [1, 1], 8), FULL)
    assert work(depthwise, 1, 8, 8, 8) == "conv2d depthwise 3x3 s2, 16 × 8→8, padding [1, 1], 8 groups"
    spread = Layer("conv_transpose", (8, 2, 2, 2), ([2, 2], [0, 0], [0, 0], 1, [1, 1]), FULL)
    assert work(spread, 1, 8, 3, 3) == "conv_transpose2d 2x2 s2, 36 × 8→2"


def test_levels_that_could_saturate_are_not_centered_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `convert` has proven goes for the levels as they are stored."""
    layer = Layer("conv", (6, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 1), FULL, zero_points=60)
    x = layer.input(2, 4, 6, 5)
    monkeypatch.setattr("quantc.targets.kernels.int8_conv_base.adds_in_16_bits", lambda: True)
    kernels, reasons = layer.kernels(x)
    assert [kernel.family for kernel in kernels] == ["float32"]
    assert sum("cut off on this processor" in reason for reason in reasons) == 2
    monkeypatch.setattr("quantc.targets.kernels.int8_conv_base.adds_in_16_bits", lambda: False)
    assert [kernel.family for kernel in layer.kernels(x)[0]] == ["onednn", "fbgemm", "float32"]


def refusal(layer: Layer, x: torch.Tensor) -> str:
    with pytest.raises(NoKernelError) as caught:
        check_bytes(layer.call(x), "the engine")
    return str(caught.value)


def test_operands_that_no_engine_convolves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = plain()
    x = layer.input(2, 4, 6, 5)
    check_bytes(layer.call(x), "the engine")
    assert refusal(layer, x.to(torch.int8)) == "the engine convolves uint8"
    arguments = list(layer.arguments())
    monkeypatch.setattr(Layer, "arguments", lambda self: tuple(arguments))
    arguments[1] = arguments[1].to(torch.int16)
    assert refusal(layer, x) == "the engine takes weights of int8, not torch.int16"


@pytest.mark.parametrize(("zero_points", "is_centered"), [(0, True), (20, True), (120, False)])
def test_weights_are_centered_where_bytes_hold_the_difference(zero_points: int, is_centered: bool) -> None:
    layer = plain(zero_points=zero_points, most=40)
    x = layer.input(1, 4, 6, 5)
    kernel = ConvFloat(layer.call(x), Ending.of(layer.call(x)))
    _, weight, zeros, *_ = layer.arguments()
    assert kernel.is_centered is is_centered
    shifted = weight.long() if zeros is None else weight.long() - zeros.reshape(-1, 1, 1, 1)
    assert torch.equal(kernel.levels().long(), shifted if is_centered else weight.long())
    assert torch.equal(kernel.plain(kernel.rows()), weight)
    if is_centered:
        assert symmetric(kernel, "the engine") is kernel
    else:
        with pytest.raises(NoKernelError, match="the engine takes symmetric weights"):
            symmetric(kernel, "the engine")


@pytest.mark.parametrize("zero_point", [7, 200])
def test_the_reach_of_sums_is_that_of_the_largest_products(zero_point: int) -> None:
    """A tap of 64 by levels up to 248 away from 7 is 15872, and up to 200 away from 200 is 12800: 14 bits and a sign."""
    layer = Layer("conv", (1, 1, 1, 1), ([1, 1], [0, 0], [1, 1], 1), FULL, zero_point, bias=False)
    x = layer.input(1, 1, 2, 2)
    kernel = ConvFloat(layer.call(x), Ending.of(layer.call(x)))
    kernel.get_buffer("weight").fill_(-64)
    kernel.get_buffer("multiplier").fill_(1.0)
    kernel.check_reach(15)
    with pytest.raises(NoKernelError, match="14 bits do not hold"):
        kernel.check_reach(14)


def test_a_row_is_an_image_of_one_row() -> None:
    weight = torch.arange(24).reshape(2, 3, 4)
    assert torch.equal(two_axes(weight), weight.reshape(2, 3, 1, 4))
    image = torch.zeros(2, 3, 4, 5)
    assert two_axes(image) is image


def test_nothing_in_gives_nothing_out_of_the_right_shape() -> None:
    layer = plain()
    x = layer.input(0, 4, 6, 5)
    for kernel in layer.kernels(x)[0]:
        found = kernel(x)
        assert (found.shape, found.dtype) == ((0, 6, 6, 5), torch.uint8)
