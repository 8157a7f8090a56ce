"""fbgemm's int8 convolutions: they take zero points of weights, and hand quantized tensors on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantc.targets.kernels.fbgemm_conv import ConvFbgemm, fbgemm
from quantc.targets.kernels.kernel import KernelForm
from quantc.targets.kernels.kernel_table import NoKernelError
from quantc.targets.kernels.packing import as_bytes, as_quantized
from tests.support.byte_convs import FLOAT, FULL, NARROW, RELU, Layer, close, plain
from tests.support.stored_weights import needs_fbgemm

PLAIN, QUANTIZED = KernelForm.PLAIN, KernelForm.QUANTIZED
pytestmark = needs_fbgemm


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def kernel_of(layer: Layer, x: Tensor) -> ConvFbgemm:
    made = fbgemm(layer.call(x))
    assert isinstance(made, ConvFbgemm)
    return made


@pytest.mark.parametrize("out", [FULL, RELU, NARROW], ids=["all", "relu", "narrow"])
@pytest.mark.parametrize("zero_points", [0, 20, 120])
def test_it_is_torchs_convolution_of_the_numbers_that_levels_stand_for(
    out: tuple[object, ...], zero_points: int
) -> None:
    layer = plain(out, zero_points=zero_points, most=40)
    x = layer.input(2, 4, 6, 5)
    kernel = kernel_of(layer, x)
    close(kernel(x), layer.expected(x), kernel.name)
    assert torch.equal(kernel.unpack(kernel._packed)["weight"], layer.arguments()[1])
    assert kernel.is_centered is (zero_points < 120)


def test_float_results_are_refused() -> None:
    layer = plain(FLOAT)
    with pytest.raises(NoKernelError, match=r"yield uint8, not torch\.float32"):
        fbgemm(layer.call(layer.input(1, 4, 6, 5)))


def test_sums_far_beyond_the_range_of_a_result() -> None:
    """fbgemm rounds to 32 bits before it cuts off: what does not fit would become the least level."""
    layer = plain(factor=2e4)
    x = layer.input(2, 4, 6, 5)
    kernels, reasons = layer.kernels(x)
    assert [kernel.family for kernel in kernels] == ["onednn", "float32"]
    assert any("32 bits do not hold" in reason for reason in reasons)
    layer.check(x)


@pytest.mark.parametrize("reads", [PLAIN, QUANTIZED])
@pytest.mark.parametrize("yields", [PLAIN, QUANTIZED])
@pytest.mark.parametrize("batch", [2, 0])
def test_quantized_tensors_may_come_in_and_go_out(reads: KernelForm, yields: KernelForm, batch: int) -> None:
    layer = plain(RELU)
    x = layer.input(batch, 4, 6, 5)
    kernel = kernel_of(layer, x)
    assert kernel.takes_quantized(4)
    assert kernel.gives_quantized
    run = kernel.bound(kernel.pack(), reads, yields)
    made = run(as_quantized(x, 1.0, layer.x_zero_point) if reads is QUANTIZED else x)
    if yields is QUANTIZED:
        assert (made.q_scale(), made.q_zero_point()) == (1.0, RELU[0])
        made = as_bytes(made)
    close(made, layer.expected(x), "bound")


def test_quantized_tensors_are_only_for_batches_of_images_and_bounds_the_kernel_keeps() -> None:
    row = Layer("conv", (6, 4, 3), ([1], [1], [1], 1), FULL)
    of_rows = kernel_of(row, row.input(2, 4, 6))
    assert not of_rows.takes_quantized(3)
    assert not of_rows.gives_quantized
    narrow = plain(NARROW)
    images = kernel_of(narrow, narrow.input(2, 4, 6, 5))
    assert images.takes_quantized(4)
    assert not images.takes_quantized(3)
    assert not images.gives_quantized
