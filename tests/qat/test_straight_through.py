"""Fake quantization: bits and gradients against torch's own ops and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.qat.straight_through import fake_quantize, gradient_factor, learned_fake_quantize
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import PerChannel
from quantc.spec.numerics import QParams
from quantc.spec.spec import INT8, INT8_NARROW_WEIGHT, INT8_WEIGHT, INT16, UINT8, QuantSpec

SPECS = (UINT8, INT8, UINT8.but(qmax=127), INT8.but(qmin=-7, qmax=7), INT16)
BY_CHANNEL = (INT8_WEIGHT, INT8_NARROW_WEIGHT.but(qmin=-7, qmax=7), INT8.but(granularity=PerChannel(axis=1)))

PRIVATE: Any = torch
"""Its ops for learned scales are not public."""
scales = st.floats(2**-20, 2**10, width=32)


def ties(scale: float) -> Tensor:
    """Numbers on, and next to, the middle between two levels."""
    middles = torch.arange(-301, 302).float() * 0.5 * torch.tensor(scale)
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([middles, torch.nextafter(middles, up), torch.nextafter(middles, down)])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def decomposed(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """What the converted program computes."""
    ops = decomposed_ops()
    result: Tensor
    ends = (spec.qmin, spec.qmax, spec.dtype.storage)
    if isinstance(spec.granularity, PerChannel):
        axis = spec.granularity.axis
        levels = ops.quantize_per_channel(x, scale, zero_point, axis, *ends)
        result = ops.dequantize_per_channel(levels, scale, zero_point, axis, *ends)
    else:
        levels = ops.quantize_per_tensor(x, float(scale), int(zero_point), *ends)
        result = ops.dequantize_per_tensor(levels, float(scale), int(zero_point), *ends)
    return result


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(scale=scales, share=st.floats(0, 1))
@settings(max_examples=40)
def test_one_scale_gives_the_bits_of_the_converted_program(spec: QuantSpec, scale: float, share: float) -> None:
    zero_point = torch.tensor(round(spec.qmin + share * (spec.qmax - spec.qmin)))
    x = ties(scale)
    found = fake_quantize(x, QParams(torch.tensor(scale), zero_point), spec)
    assert torch.equal(bits(found), bits(decomposed(x, torch.tensor(scale), zero_point, spec)))


@pytest.mark.parametrize("spec", BY_CHANNEL, ids=str)
@given(scale=arrays.arrays(np.float32, 3, elements=scales), data=st.data())
@settings(max_examples=25)
def test_scales_by_channel_give_the_bits_of_the_converted_program(spec: QuantSpec, scale: Any, data: Any) -> None:
    ends = st.integers(spec.qmin, spec.qmax)
    zero_point = torch.tensor(data.draw(st.lists(ends, min_size=3, max_size=3)))
    axis = spec.granularity.axis if isinstance(spec.granularity, PerChannel) else 0
    x = torch.stack([ties(float(one)) for one in scale], axis)
    found = fake_quantize(x, QParams(torch.from_numpy(scale), zero_point), spec)
    assert torch.equal(bits(found), bits(decomposed(x, torch.from_numpy(scale), zero_point, spec)))


def gradients(value: Tensor, upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs, upstream, retain_graph=True)


@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
def test_the_mask_of_one_scale_is_that_of_torch(spec: QuantSpec) -> None:
    scale, zero_point = torch.tensor(0.037), torch.tensor(spec.qmin + 3)
    x = (ties(0.037) * 3).requires_grad_()
    upstream = torch.randn(x.shape)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero_point.to(torch.int32), spec.qmin, spec.qmax)
    ours = fake_quantize(x, QParams(scale, zero_point), spec)
    assert torch.equal(ours, theirs)
    assert torch.equal(*gradients(ours, upstream, x), *gradients(theirs, upstream, x))
    assert 0 < int((gradients(ours, upstream, x)[0] == 0).sum()) < x.numel()


@pytest.mark.parametrize("axis", [0, 1])
def test_the_mask_by_channel_is_that_of_torch(axis: int) -> None:
    spec = INT8.but(granularity=PerChannel(axis=axis), qmin=-8, qmax=7)
    x = torch.randn(4, 4, 5).requires_grad_()
    scale, zero_point = torch.rand(4) * 0.2 + 0.01, torch.tensor([-3, 0, 2, 5])
    upstream = torch.randn(x.shape)
    theirs = torch.fake_quantize_per_channel_affine(x, scale, zero_point.to(torch.int32), axis, -8, 7)
    ours = fake_quantize(x, QParams(scale, zero_point), spec)
    assert torch.equal(ours, theirs)
    assert torch.equal(*gradients(ours, upstream, x), *gradients(theirs, upstream, x))


def held_fast(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec) -> Callable[..., Tensor]:
    """Fake quantization with the error of each rounding held as it is here, and with it what is clipped: smooth, so
    differences of it are gradients."""
    levels = torch.round(x / scale)
    error = levels - x / scale
    below, above = levels < spec.qmin - zero_point, levels > spec.qmax - zero_point

    def smooth(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        inside = torch.where(above, spec.qmax - zero_point, x / scale + error)
        return scale * torch.where(below, spec.qmin - zero_point, inside)

    return smooth


@pytest.mark.parametrize(("spec", "channels"), [(UINT8.but(qmax=15), 1), (INT8_WEIGHT.but(qmin=-8, qmax=7), 3)])
def test_gradients_of_learned_scales_are_finite_differences(spec: QuantSpec, channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 40, dtype=torch.float64)
    shape = (channels, 1)
    scale = torch.linspace(0.11, 0.17, channels, dtype=torch.float64)
    zero_point = torch.full((channels,), 4.0 if channels == 1 else 0.0, dtype=torch.float64)
    inputs = [part.clone().requires_grad_() for part in (x, scale.reshape(shape), zero_point.reshape(shape))]

    smooth = held_fast(x, scale.reshape(shape), zero_point.reshape(shape), spec)
    assert torch.autograd.gradcheck(smooth, inputs)  # finite differences agree with it; so it can be held against ours
    upstream = torch.randn(x.shape, dtype=torch.float64)
    expected = gradients(smooth(*inputs), upstream, *inputs)
    squeezed = [part.detach().float() for part in (x, scale, zero_point)]
    ours = [(part.squeeze() if channels == 1 and part.numel() == 1 else part).requires_grad_() for part in squeezed]
    value = learned_fake_quantize(ours[0], ours[1], ours[2], spec, 1.0)
    assert torch.allclose(value, smooth(*inputs).float(), atol=1e-6)
    for found, wanted in zip(gradients(value, upstream.float(), *ours), expected, strict=True):
        assert torch.allclose(found.reshape(-1), wanted.float().reshape(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plus", [False, True])
def test_learned_scales_are_those_of_torch(plus: bool) -> None:
    torch.manual_seed(1)
    spec = UINT8.but(qmax=31)
    x = torch.randn(50, 20).requires_grad_()
    scale, zero_point = torch.tensor(0.09).requires_grad_(), torch.tensor(11.0).requires_grad_(plus)
    factor = gradient_factor(x.numel(), spec)
    upstream = torch.randn(x.shape)
    ours = learned_fake_quantize(x, scale, zero_point, spec, factor)
    their_scale, their_zero = (part.detach().reshape(1).clone().requires_grad_() for part in (scale, zero_point))
    theirs = PRIVATE._fake_quantize_learnable_per_tensor_affine(x, their_scale, their_zero, 0, 31, factor)
    assert torch.equal(ours, theirs)
    inputs = (x, scale, zero_point) if plus else (x, scale)
    found = gradients(ours, upstream, *inputs)
    wanted = gradients(theirs, upstream, x, their_scale, their_zero)
    for mine, other in zip(found, wanted, strict=False):
        assert torch.allclose(mine.reshape(-1), other.reshape(-1), rtol=1e-4, atol=1e-6)


def test_learned_scales_by_channel_are_those_of_torch() -> None:
    torch.manual_seed(2)
    spec = INT8_WEIGHT.but(qmin=-8, qmax=7)
    x, upstream = torch.randn(5, 30).requires_grad_(), torch.randn(5, 30)
    scale = (torch.rand(5) * 0.2 + 0.05).requires_grad_()
    ours = learned_fake_quantize(x, scale, torch.zeros(5), spec, 0.5)
    theirs = PRIVATE._fake_quantize_learnable_per_channel_affine(x, scale, torch.zeros(5), 0, -8, 7, 0.5)
    assert torch.equal(ours, theirs)
    for mine, other in zip(gradients(ours, upstream, x, scale), gradients(theirs, upstream, x, scale), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_other_floats_keep_their_type() -> None:
    x = torch.randn(10, dtype=torch.bfloat16).requires_grad_()
    value = fake_quantize(x, QParams(torch.tensor(0.1), torch.tensor(7)), UINT8)
    assert value.dtype == torch.bfloat16
    assert gradients(value.sum(), torch.ones((), dtype=torch.bfloat16), x)[0].dtype == torch.bfloat16
