"""Kernels on stored weights: as close to float64 as float32 is, for any weights, shapes and inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc import QuantSpec
from quantc.targets.kernels.stored_weight import StoredWeight
from quantc.targets.kernels.weight_only_kernels import FloatLinear, HalfLinear, HalfLinearThreads
from tests.support.stored_weights import (
    EXACT,
    FORMATS,
    INEXACT,
    assert_as_good_as_float,
    assert_rounded_only,
    kernels,
    lowered,
    needs_fbgemm,
    real,
    seeded,
    stored_weights,
    threads,
)

# -- products ------------------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT)
def test_weights_that_float16_holds_run_on_fbgemm(spec: QuantSpec, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 96)
    program, module = lowered(nn.Linear(96, 130, bias=bias), x, spec)
    (kernel,) = kernels(module)
    assert type(kernel) is HalfLinear
    found, shift = module(x), kernel.state_dict().get("bias")
    assert_rounded_only(found, x, real(kernel), shift)
    assert_as_good_as_float(found, x, real(kernel), shift)
    assert torch.allclose(found, program(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(module.program(x), program(x))


@pytest.mark.parametrize("spec", INEXACT.values(), ids=INEXACT)
def test_weights_that_it_does_not_hold_have_the_bits_of_float(spec: QuantSpec) -> None:
    x = torch.randn(9, 96)
    program, module = lowered(nn.Linear(96, 130), x, spec)
    assert [type(kernel) for kernel in kernels(module)] == [FloatLinear]
    assert module.placed[0].reason == "its weights are not exact in float16"
    assert "float32" in module.placed[0].kernel
    assert torch.equal(module(x), program(x))


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_qnnpack_has_the_bits_of_float(spec: QuantSpec) -> None:
    x = torch.randn(9, 96)
    program, module = lowered(nn.Linear(96, 130), x, spec, "qnnpack")
    assert [type(kernel) for kernel in kernels(module)] == [FloatLinear]
    assert torch.equal(module(x), program(x))


def test_few_outputs_stay_float() -> None:
    x = torch.randn(9, 96)
    program, module = lowered(nn.Linear(96, 100), x, qc.INT8_WEIGHT_ONLY)
    assert module.placed[0].reason == "with less than 128 outputs float is faster"
    assert torch.equal(module(x), program(x))


@needs_fbgemm
@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP], ids=str)
def test_several_threads_have_a_kernel_of_their_own(spec: QuantSpec) -> None:
    x = torch.randn(9, 768)
    with threads(2):
        _, small = lowered(nn.Linear(96, 130), torch.randn(9, 96), spec)
        program, module = lowered(nn.Linear(768, 768), x, spec)
        assert [type(kernel) for kernel in kernels(small)] == [FloatLinear]
        assert "2 threads" in small.placed[0].reason
        (kernel,) = kernels(module)
        assert type(kernel) is HalfLinearThreads
        assert_rounded_only(module(x), x, real(kernel), kernel.state_dict()["bias"])
        assert torch.allclose(module(x), program(x), rtol=1e-5, atol=1e-5)


class Product(nn.Module):
    """A product whose weight has its outputs on the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 130, generator=seeded(1)))
        self.shift = nn.Parameter(torch.randn(130, generator=seeded(2)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, torch.addmm(self.shift, x.reshape(-1, 96), self.weight)


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_products_with_outputs_last(spec: QuantSpec) -> None:
    x = torch.randn(2, 9, 96)
    program, module = lowered(Product(), x, spec)
    assert len(kernels(module)) == 2
    for found, expected in zip(module(x), program(x), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=2e-5)


@needs_fbgemm
@settings(max_examples=60)
@given(stored_weights(), st.integers(0, 5), st.booleans(), st.integers(0, 2**20))
def test_products_are_rounded_only(weight: StoredWeight, rows: int, has_bias: bool, seed: int) -> None:
    x = torch.randn(rows, weight.inputs, generator=seeded(seed))
    bias = torch.randn(weight.outputs, generator=seeded(seed + 1)) if has_bias else None
    kernel = HalfLinear(weight, bias)
    found, exact = kernel(x), weight.real()
    assert found.shape == (rows, weight.outputs)
    if rows:
        assert_rounded_only(found, x, exact, bias)


@needs_fbgemm
@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e30])
@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP, qc.FP8_E4M3_WEIGHT], ids=str)
def test_tiny_and_huge_weights(spec: QuantSpec, size: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    with torch.no_grad():
        model.weight.mul_(size)
        model.weight[3] = 0
    x = torch.randn(7, 64)
    program, module = lowered(model, x, spec.but(eps=2.0**-126))
    (kernel,) = kernels(module)
    assert type(kernel) is HalfLinear
    assert_rounded_only(module(x), x, real(kernel), None)
    assert not module(x)[:, 3].any()
    assert torch.equal(module.program(x), program(x))


@needs_fbgemm
@pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT)
def test_large_activations_overflow_where_float_does(spec: QuantSpec) -> None:
    """The sums are as large as those of the weights themselves: nothing overflows on the way."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128)
    x = torch.randn(7, 64) * 1e36
    program, module = lowered(model, x, spec)
    found, expected = module(x), program(x).detach()
    assert bool(found.isfinite().all())
    assert torch.allclose(found, expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-6)


@needs_fbgemm
@pytest.mark.parametrize("shape", [(96,), (1, 96), (0, 96), (2, 3, 96), (2, 0, 96), (2, 1, 3, 96)])
@pytest.mark.parametrize("spec", [qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP], ids=str)
def test_inputs_of_any_rank(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    model = nn.Linear(96, 128)
    x = torch.randn(shape)
    weight = lowered(model, torch.randn(2, 96), spec)[1]
    (kernel,) = kernels(weight)
    found = kernel(x)
    assert found.shape == (*shape[:-1], 128)
    assert torch.allclose(found, F.linear(x, real(kernel), model.bias), rtol=1e-5, atol=1e-5)


@needs_fbgemm
def test_inputs_that_do_not_lie_in_order() -> None:
    (kernel,) = kernels(lowered(nn.Linear(96, 128), torch.randn(2, 96), qc.INT8_WEIGHT_ONLY)[1])
    x = torch.randn(96, 2, 8)[:, :, ::2].permute(2, 1, 0)
    assert torch.equal(kernel(x), kernel(x.contiguous()))


@needs_fbgemm
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT)
def test_what_is_not_finite_is_as_in_float(spec: QuantSpec, value: float) -> None:
    x = torch.randn(5, 96)
    x[2, 7] = value
    program, module = lowered(nn.Linear(96, 128), torch.randn(5, 96), spec)
    (found,), expected = module.module(x), program.module(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_wrong_columns_are_refused() -> None:
    (kernel,) = kernels(lowered(nn.Linear(96, 128), torch.randn(5, 96), qc.INT8_WEIGHT_ONLY)[1])
    with pytest.raises(RuntimeError):
        kernel(torch.randn(5, 95))


# -- convolutions and recurrent layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_convolutions_read_a_float_weight_that_is_made_once(spec: QuantSpec) -> None:
    x = torch.randn(2, 32, 9, 9)
    program, module = lowered(nn.Conv2d(32, 40, 3), x, spec)
    assert [row.kernel for row in module.placed] == ["float32 weight made once"]
    assert torch.allclose(module(x), program(x), rtol=1e-5, atol=1e-5)
    (kernel,) = kernels(module)
    assert kernel() is kernel()
