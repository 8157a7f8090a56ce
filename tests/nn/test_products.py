"""Linear layers and convolutions of quantized tensors on the kernels of a target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import DataError
from quantc.nn import QuantizedTensor, observers, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs
from quantc.nn.products import Product, product_kernel
from tests.support.nn_cases import steps_apart


def test_a_channel_of_zeros_with_a_large_bias() -> None:
    """Its scale is the smallest there is, in steps of which the bias would overflow the accumulator."""
    torch.manual_seed(0)
    module = nn.Linear(8, 3)
    module.weight.data[1] = 0
    module.bias.data[1] = 500.0
    x = torch.randn(4, 8)
    module.qconfig = qconfigs.get_default_qconfig("x86")  # type: ignore[assignment]
    observer = observers.MinMaxObserver()
    observer(module(x))
    module.activation_post_process = observer
    made = quantized.Linear.from_float(module)
    found = made(quantize_per_tensor(x, 0.0005, 117)).dequantize()
    assert found[:, 1].tolist() == pytest.approx([500.0] * 4, abs=made.scale)


def float_result(product: Product, x: QuantizedTensor) -> Tensor:
    """What torch makes of the numbers."""
    window: dict[str, Any] = dict(product.window)
    name = "linear" if product.op == "linear" else f"{product.op}{product.axes}d"
    made: Tensor = getattr(functional, name)(x.dequantize(), product.weight.dequantize(), product.bias, **window)
    return made.relu() if product.relu else made


def computed(target: str, product: Product, x: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(product_kernel(target, product, x)(x.data_of), *product.grid)


WINDOW = (("stride", [2, 1]), ("padding", [1, 0]), ("dilation", [1, 1]), ("groups", 2))
TRANSPOSED = (
    ("stride", [2, 1]), ("padding", [1, 0]), ("output_padding", [1, 0]), ("groups", 2), ("dilation", [1, 1])
)  # fmt: skip


@pytest.mark.parametrize("target", ["x86", "qnnpack"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtypes", [("uint8", "uint8"), ("int8", "int8"), ("uint8", "int8"), ("int8", "uint8")])
@pytest.mark.parametrize("op", ["linear", "conv", "conv_transpose"])
def test_a_product_is_within_half_a_step_of_float(op: str, dtypes: tuple[str, str], relu: bool, target: str) -> None:
    """Whatever the signs of what is read and of the result: kernels of unsigned bytes are given shifted ones."""
    torch.manual_seed(0)
    read, made = (getattr(torch, name) for name in dtypes)
    shape, window = {
        "linear": ((3, 8), ()),
        "conv": ((6, 2, 3, 3), WINDOW),
        "conv_transpose": ((4, 3, 3, 3), TRANSPOSED),
    }[op]
    weight = quantize_per_tensor(torch.randn(shape), 0.02, 0, torch.int8)
    bias = torch.randn(3 if op == "linear" else 6)
    low = torch.iinfo(made).min
    product = Product(op, weight, bias, (0.05, low + 100), made, relu, window)
    x = quantize_per_tensor(torch.randn(2, 8) if op == "linear" else torch.randn(2, 4, 5, 5), 0.02, 3, read)
    found = computed(target, product, x)
    assert found.dtype is made
    wanted = quantize_per_tensor(float_result(product, x), *product.grid, made)
    assert steps_apart(found, wanted) <= 1
    assert not relu or float(found.dequantize().min()) >= 0


def test_scales_by_output_of_a_transposed_convolution_are_common_to_its_groups() -> None:
    levels = torch.ones(4, 3, 1, 1, dtype=torch.int8)
    scales = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    weight = QuantizedTensor(levels, scales, torch.zeros(3, dtype=torch.int64), 1)
    product = Product("conv_transpose", weight, None, (1.0, 0), window=TRANSPOSED)
    assert product.by_output(scales).tolist() == [0.5, 0.25, 0.125, 0.5, 0.25, 0.125]
    assert Product("conv", weight, None, (1.0, 0), window=WINDOW).by_output(scales).tolist() == [0.5, 0.25, 0.125]
    assert (product.groups, product.axes) == (2, 2)


def test_a_large_bias_of_a_transposed_convolution_in_groups_is_refused() -> None:
    weight = QuantizedTensor(
        torch.zeros(4, 3, 1, 1, dtype=torch.int8), torch.full((3,), 1e-12), torch.zeros(3, dtype=torch.int64), 1
    )
    product = Product("conv_transpose", weight, torch.full((6,), 100.0), (1.0, 0), window=TRANSPOSED)
    with pytest.raises(DataError, match="groups"):
        product_kernel("x86", product, quantize_per_tensor(torch.randn(1, 4, 5, 5), 0.01, 3))
