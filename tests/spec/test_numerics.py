"""The numbers, against torch's own ops and observers, bit for bit, on thousands of tensors."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

from quantc.errors import DataError
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor, PerToken, Scheme
from quantc.spec.numerics import (
    BIAS_LIMIT,
    QParams,
    allowed_scale,
    dequantize,
    fake_quantize,
    fit_weight_scale,
    multiplier,
    qparams_from_range,
    qparams_of,
    qparams_of_sound_range,
    quantize,
    quantize_bias,
    requantize,
    scale_product,
    to_significant_bits,
    why_not_scale,
)
from quantc.spec.spec import FP8_E4M3_WEIGHT, FP8_E5M2_WEIGHT, FP16_WEIGHT, INT8, INT8_WEIGHT, UINT8, QuantSpec
from quantc.store.bit_packing import Width, pack, unpack
from tests.support.specs import families

AFFINE = [
    INT8,
    UINT8,
    INT8.but(eps=2**-23),
    UINT8.but(qmax=127),
    INT8.but(qmin=-127),
    INT8.but(dtype="int4", qmin=None),
    QuantSpec(dtype=DType.INT16),
]
SYMMETRIC = [
    INT8.but(scheme="symmetric"),
    INT8.but(scheme="symmetric", qmin=-127),
    UINT8.but(scheme="symmetric"),
    UINT8.but(scheme="symmetric", qmax=127),
    INT8.but(scheme="symmetric", dtype="int4", eps=1e-30),
    QuantSpec(dtype=DType.INT16, scheme=Scheme.SYMMETRIC),
    QuantSpec(dtype=DType.INT32, scheme=Scheme.SYMMETRIC),
]
SPECS = [*AFFINE, *SYMMETRIC]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal element for element, and -0.0 is not 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == torch.float32:
        left, right = left.view(torch.int32), right.view(torch.int32)
    return torch.equal(left, right)


def torch_observer(spec: QuantSpec, *, per_channel: bool = False) -> Any:
    limits: dict[str, Any] = {"quant_min": spec.qmin, "quant_max": spec.qmax}
    if (spec.qmin, spec.qmax) == _limits(spec.dtype.storage):
        limits = {}  # torch tells a range that was given from the same one that was not
    schemes = {
        (False, Scheme.AFFINE): torch.per_tensor_affine,
        (False, Scheme.SYMMETRIC): torch.per_tensor_symmetric,
        (True, Scheme.AFFINE): torch.per_channel_affine,
        (True, Scheme.SYMMETRIC): torch.per_channel_symmetric,
    }
    kind: Any = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    return kind(dtype=spec.dtype.storage, qscheme=schemes[per_channel, spec.scheme], eps=spec.eps, **limits)


def _limits(storage: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(storage).min, torch.iinfo(storage).max


def ranges(count: int) -> tuple[Tensor, Tensor]:
    """Ranges of every magnitude and place: around zero, to one side of it, of no width, denormal, huge."""
    generator = torch.Generator().manual_seed(1)
    magnitude = torch.pow(10.0, torch.randint(-44, 37, (count,), generator=generator).double())
    ends = torch.randn(2, count, generator=generator, dtype=torch.float64) * magnitude
    ends[1, ::7] = ends[0, ::7]
    ends[0, ::11] = 0.0
    ends[:, ::13] = -0.0
    ends[0, 1::5] *= 1e-5
    low, high = ends.float().aminmax(dim=0)
    return low, high


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_qparams_of_ranges_are_torchs(spec: QuantSpec) -> None:
    low, high = ranges(5000)
    ours = qparams_from_range(low, high, spec)
    scale, zero_point = torch_observer(spec)._calculate_qparams(low, high)
    assert same_bits(ours.scale, scale)
    assert torch.equal(ours.zero_point, zero_point.long())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_qparams_of_tensors_are_torchs_min_max_observers(spec: QuantSpec) -> None:
    for x in families(torch.Generator().manual_seed(2), 250, 257):
        observer = torch_observer(spec)
        observer(x)
        scale, zero_point = observer.calculate_qparams()
        ours = qparams_of(x, spec)
        assert same_bits(ours.scale.reshape(1), scale)
        assert ours.zero_point.reshape(1).tolist() == zero_point.tolist()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_qparams_per_channel_are_torchs_observers(spec: QuantSpec) -> None:
    x = torch.stack(families(torch.Generator().manual_seed(3), 40, 72)).reshape(40, 2, 6, 6)
    for axis, value in ((0, x), (1, x.transpose(0, 1)), (-1, x.movedim(0, -1))):
        observer = torch_observer(spec, per_channel=True)
        observer.ch_axis = axis % 4
        observer(value)
        scale, zero_point = observer.calculate_qparams()
        ours = qparams_of(value, spec.but(granularity=PerChannel(axis=axis)))
        assert same_bits(ours.scale, scale)
        assert torch.equal(ours.zero_point, zero_point.long())


@given(
    st.floats(-(2.0**99), 2.0**99, width=32),
    st.floats(-(2.0**99), 2.0**99, width=32),
    st.sampled_from([spec for spec in SPECS if spec.dtype is not DType.INT32]),
)
def test_zero_is_exact_and_the_range_is_covered(one: float, other: float, spec: QuantSpec) -> None:
    low, high = torch.tensor(min(one, other)), torch.tensor(max(one, other))
    found = qparams_from_range(low, high, spec)
    assert dequantize(quantize(torch.zeros(1), found, spec), found, spec).item() == 0.0
    scale, zero_point = found.one
    assert scale >= torch.tensor(spec.eps).item()
    slack = 1.01 * scale if spec.scheme is Scheme.SYMMETRIC else 0.51 * scale
    assert (spec.qmin - zero_point) * scale <= min(low.item(), 0.0) + slack
    assert (spec.qmax - zero_point) * scale >= max(high.item(), 0.0) - slack


def q_arguments(spec: QuantSpec) -> tuple[int, int, torch.dtype]:
    return spec.qmin, spec.qmax, spec.dtype.storage


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.dtype is not DType.INT32], ids=str)
def test_quantize_per_tensor_is_torchs(spec: QuantSpec) -> None:
    ops = decomposed_ops()
    for x in families(torch.Generator().manual_seed(4), 200, 65):
        found = qparams_of(x, spec)
        # half of the calls with a range other than the data's, so that values are clipped
        found = QParams(found.scale / 3 if found.scale > 1e-30 else found.scale, found.zero_point)
        q = quantize(x, found, spec)
        assert same_bits(q, ops.quantize_per_tensor(x, *found.one, *q_arguments(spec)))
        assert same_bits(dequantize(q, found, spec), ops.dequantize_per_tensor(q, *found.one, *q_arguments(spec)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_quantize_per_channel_is_torchs(spec: QuantSpec) -> None:
    ops = decomposed_ops()
    x = torch.stack(families(torch.Generator().manual_seed(5), 200, 60)).reshape(200, 3, 4, 5)
    for axis, value in ((0, x), (2, x.movedim(0, 2))):
        share = spec.but(granularity=PerChannel(axis=axis))
        found = qparams_of(value, share)
        if spec.dtype is not DType.INT32:  # beyond its range float32 to int32 is not defined
            found = QParams(found.scale / 2, found.zero_point)
        q = quantize(value, found, share)
        arguments = (found.scale, found.zero_point, axis, *q_arguments(spec))
        assert same_bits(q, ops.quantize_per_channel(value, *arguments))
        assert same_bits(dequantize(q, found, share), ops.dequantize_per_channel(q, *arguments))


@pytest.mark.parametrize("spec", AFFINE + SYMMETRIC[:5], ids=str)
def test_quantize_per_token_and_per_group_are_torchs(spec: QuantSpec) -> None:
    ops = decomposed_ops()
    x = torch.stack(families(torch.Generator().manual_seed(6), 200, 64))
    token = spec.but(granularity=PerToken())
    found = qparams_of(x, token)
    q = quantize(x, found, token)
    assert found.scale.shape == (200, 1)
    assert same_bits(q, ops.quantize_per_token(x, found.scale, found.zero_point, *q_arguments(spec)))
    back = ops.dequantize_per_token(q, found.scale, found.zero_point, *q_arguments(spec), torch.float32)
    assert same_bits(dequantize(q, found, token), back)

    group = spec.but(granularity=PerGroup(axis=1, size=16))
    found = qparams_of(x, group)
    q = quantize(x, found, group)
    assert found.scale.shape == (200, 4)
    assert same_bits(q, ops.quantize_per_channel_group(x, found.scale, found.zero_point, *q_arguments(spec), 16))
    back = ops.dequantize_per_channel_group(q, found.scale, found.zero_point, *q_arguments(spec), 16, torch.float32)
    assert same_bits(dequantize(q, found, group), back)


def test_groups_along_any_axis_are_groups_of_the_transposed() -> None:
    x = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(7))
    middle, last = (INT8_WEIGHT.but(granularity=PerGroup(axis=axis, size=4)) for axis in (1, -1))
    ours = fake_quantize(x, qparams_of(x, middle), middle)
    moved = x.movedim(1, -1).contiguous()
    assert torch.equal(ours.movedim(1, -1), fake_quantize(moved, qparams_of(moved, last), last))


@pytest.mark.parametrize("spec", [FP16_WEIGHT, FP8_E4M3_WEIGHT, FP8_E5M2_WEIGHT], ids=str)
def test_float_formats_lose_no_more_than_their_mantissa(spec: QuantSpec) -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(8)) * 10
    found = qparams_of(x, spec)
    q = quantize(x, found, spec)
    assert q.dtype == spec.dtype.storage
    kept = {DType.FP16: 11, DType.FP8_E4M3: 4, DType.FP8_E5M2: 3}[spec.dtype]
    smallest = torch.finfo(q.dtype).smallest_normal * found.scale.max()
    big = x.abs() > smallest
    error = ((dequantize(q, found, spec) - x) / x).abs()[big]
    assert error.max() <= 2.0**-kept * 1.001
    if spec.dtype is DType.FP16:
        assert torch.equal(q, x.half())


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])
    found = QParams(torch.tensor(1.0), torch.tensor(0))
    assert quantize(x, found, INT8).tolist() == [0, 2, 2, 0, -2]


# -- integers --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.floats(1e-9, 4.0),
    st.integers(-128, 127),
)
def test_requantize_is_one_rounding_in_float64(values: list[int], factor: float, zero_point: int) -> None:
    ours = requantize(torch.tensor(values), factor, zero_point, -128, 127)
    # Python's own numbers: floats are float64 and round() goes to even
    assert ours.tolist() == [min(max(round(value * factor) + zero_point, -128), 127) for value in values]


def test_requantize_per_channel_and_at_the_extremes() -> None:
    acc = torch.tensor([[2**31 - 1, -(2**31)], [3, -3]])
    assert requantize(acc, torch.tensor([1e6, 0.5], dtype=torch.float64), 10, 0, 255).tolist() == [[255, 0], [255, 8]]


def test_the_integer_form_of_a_linear_agrees_with_float_arithmetic() -> None:
    generator = torch.Generator().manual_seed(9)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((16, 32), (8, 32), (8,)))
    x_params, w_params = qparams_of(x, UINT8), qparams_of(w, INT8_WEIGHT)
    out = x @ w.T + b
    out_params = qparams_of(out, UINT8)
    x_q, w_q = quantize(x, x_params, UINT8).long() - x_params.zero_point, quantize(w, w_params, INT8_WEIGHT).long()
    acc = x_q @ w_q.T + quantize_bias(b, x_params.scale, w_params.scale)
    q = requantize(acc, multiplier(x_params.scale, w_params.scale, out_params.scale), out_params.zero_point, 0, 255)
    simulated = fake_quantize(x, x_params, UINT8) @ fake_quantize(w, w_params, INT8_WEIGHT).T + b
    assert (q - quantize(simulated, out_params, UINT8).long()).abs().max() <= 1


def test_a_bias_is_quantized_on_the_scale_of_the_accumulator() -> None:
    x_scale, w_scale = torch.tensor(0.1), torch.tensor([0.25, 0.5])
    assert quantize_bias(torch.tensor([1.0, -1.0]), x_scale, w_scale).tolist() == [40, -20]
    product = scale_product(QParams(x_scale, torch.tensor(3)), QParams(w_scale, torch.tensor([0, 0])))
    assert torch.equal(product.scale, (x_scale.double() * w_scale.double()).float())
    assert product.zero_point.tolist() == [0, 0]


@given(
    st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=8),
    st.floats(2.0**-30, 1.0, width=32),
    st.floats(2.0**-30, 1.0, width=32),
)
def test_a_raised_weight_scale_is_the_smallest_that_fits(biases: list[float], x: float, w: float) -> None:
    bias, x_scale, w_scale = torch.tensor(biases), torch.tensor(x), torch.full((len(biases),), w)
    fitted = fit_weight_scale(bias, x_scale, w_scale)
    assert quantize_bias(bias, x_scale, fitted).abs().max() <= BIAS_LIMIT
    raised = fitted > w_scale
    assert torch.equal(fitted[~raised], w_scale[~raised])
    lower = torch.nextafter(fitted, torch.zeros(()))
    steps = bias.double().abs() / (x_scale.double() * lower.double())
    assert bool((steps[raised] > BIAS_LIMIT).all())


def test_a_bias_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"more than 2\^30") as caught:
        quantize_bias(torch.tensor([1e6]), torch.tensor(1e-6), torch.tensor([1e-6]), where="linear")
    assert caught.value.where == "linear"


@given(st.sampled_from([2, 4]), st.data())
def test_packing_is_undone(bits: Width, data: st.DataObject) -> None:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    values = data.draw(st.lists(st.integers(low, high), max_size=30))
    tensor = torch.tensor(values, dtype=torch.int8)
    packed = pack(tensor, bits)
    assert packed.numel() == math.ceil(len(values) * bits / 8)
    assert torch.equal(unpack(packed, bits, tensor.shape), tensor)


def test_packing_puts_the_first_in_the_lowest_bits() -> None:
    assert pack(torch.tensor([1, -1, 7]), 4).tolist() == [0xF1, 0x07]
    assert pack(torch.tensor([1, -2, 0, -1]), 2).tolist() == [0b11001001]


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(DataError, match="do not fit in 4 bits"):
        pack(torch.tensor([8]), 4)
    with pytest.raises(DataError, match="are 2 bytes"):
        unpack(torch.zeros(3, dtype=torch.uint8), 4, torch.Size((4,)))


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    with pytest.raises(DataError, match="1 of 3 values are NaN or infinite") as caught:
        qparams_of(torch.tensor([1.0, bad, 2.0]), INT8, where="conv2d weight")
    assert caught.value.where == "conv2d weight"
    with pytest.raises(DataError, match="contains NaN or infinity"):
        qparams_from_range(torch.tensor(0.0), torch.tensor(bad), INT8)


def test_ranges_that_make_no_sense_are_refused() -> None:
    largest = torch.tensor(torch.finfo(torch.float32).max)
    with pytest.raises(DataError, match="wider than float32 can measure"):
        qparams_from_range(-largest, largest, INT8)
    with pytest.raises(DataError, match="ends before it begins"):
        qparams_from_range(torch.tensor(1.0), torch.tensor(0.0), INT8)
    with pytest.raises(DataError, match="empty tensor"):
        qparams_of(torch.zeros(0), INT8)


def test_a_shape_that_does_not_fit_the_spec_is_refused() -> None:
    with pytest.raises(DataError, match="groups of 16 do not divide the 20 elements along axis 1"):
        qparams_of(torch.ones(4, 20), INT8_WEIGHT.but(granularity=PerGroup(axis=1, size=16)))
    with pytest.raises(DataError, match="has no axis 2"):
        qparams_of(torch.ones(4, 20), INT8_WEIGHT.but(granularity=PerChannel(axis=2)))
    assert qparams_of(torch.ones(4, 20), INT8.but(granularity=PerTensor())).scale.shape == ()


FALLBACK = """
import sys
import torch
for name in ("torch.ao.quantization.fx._decomposed", "torchao", "torchao.quantization.pt2e"):
    sys.modules[name] = None
from quantc.qdq import registration as decomposed
from quantc.spec.formats import PerChannel, PerGroup, PerToken
from quantc.spec.numerics import dequantize, qparams_of, quantize
from quantc.spec.spec import INT8
ops = decomposed.decomposed_ops()
assert decomposed._library is not None, "torch's own ops were found"
x = torch.randn(6, 8)
limits = (-128, 127, torch.int8)
spec = INT8
p = qparams_of(x, spec)
q = ops.quantize_per_tensor(x, *p.one, *limits)
assert torch.equal(q, quantize(x, p, spec))
assert torch.equal(q, ops.quantize_per_tensor.tensor(x, p.scale, p.zero_point, *limits))
assert torch.equal(ops.dequantize_per_tensor(q, *p.one, *limits), dequantize(q, p, spec))
assert ops.dequantize_per_tensor(q, *p.one, *limits, out_dtype=torch.float16).dtype == torch.float16
spec = INT8.but(granularity=PerChannel(axis=1))
p = qparams_of(x, spec)
q = ops.quantize_per_channel(x, p.scale, p.zero_point, 1, *limits)
assert torch.equal(q, quantize(x, p, spec))
assert torch.equal(ops.dequantize_per_channel(q, p.scale, p.zero_point, 1, *limits), dequantize(q, p, spec))
spec = INT8.but(granularity=PerToken())
p = qparams_of(x, spec)
q = ops.quantize_per_token(x, p.scale, p.zero_point, *limits)
assert torch.equal(q, quantize(x, p, spec))
assert torch.equal(ops.dequantize_per_token(q, p.scale, p.zero_point, *limits, torch.float32), dequantize(q, p, spec))
spec = INT8.but(granularity=PerGroup(axis=1, size=4))
p = qparams_of(x, spec)
q = ops.quantize_per_channel_group(x, p.scale, p.zero_point, *limits, 4)
assert torch.equal(q, quantize(x, p, spec))
back = ops.dequantize_per_channel_group(q, p.scale, p.zero_point, *limits, 4, torch.float32)
assert torch.equal(back, dequantize(q, p, spec))
meta = ops.quantize_per_tensor(x.to("meta"), 0.1, 0, *limits)
assert meta.dtype == torch.int8 and meta.shape == x.shape
"""


def test_the_ops_are_defined_here_where_torch_defines_none() -> None:
    done = subprocess.run([sys.executable, "-c", FALLBACK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@given(st.floats(2.0**-20, 2.0**20, width=32))
def test_powers_of_two_are_rounded_up_so_that_the_range_is_kept(high: float) -> None:
    spec = INT8.but(scheme="symmetric", scale_bits=1, eps=2.0**-60)
    exact = qparams_of_sound_range(torch.tensor(-high), torch.tensor(high), spec.but(scale_bits=24)).scale
    found = qparams_of_sound_range(torch.tensor(-high), torch.tensor(high), spec).scale
    assert torch.frexp(found).mantissa == 0.5
    assert exact <= found < 2 * exact


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 8, 16, 24])
@pytest.mark.parametrize("eps", [2.0**-12, 0.0103, 1e-3, 0.3])
def test_allowed_scales_have_few_bits_and_are_not_below_the_smallest(bits: int, eps: float) -> None:
    spec = INT8.but(scale_bits=bits, eps=eps, scheme="symmetric")
    given = torch.cat([torch.logspace(-9, 4, 2000), torch.tensor([eps, eps * 0.999, eps * 1.001, 1.0, 0.5])])
    found = allowed_scale(given, spec)
    mantissa = np.frexp(found.numpy().astype(np.float64))[0] * 2.0**bits
    assert (mantissa == np.round(mantissa)).all()
    assert bool((found >= torch.tensor(eps)).all())
    assert why_not_scale(found, spec) is None
    large = given > 2 * eps
    error = (found / given - 1)[large]
    assert float(error.max()) <= (1.0 if bits == 1 else 2.0**-bits * 1.0001)
    assert float(error.min()) >= (0.0 if bits == 1 else -(2.0**-bits) * 1.0001)


def test_scales_with_more_bits_are_named() -> None:
    told = why_not_scale(torch.tensor([0.5, 0.3]), INT8.but(scale_bits=1))
    assert told == "the scale 0.3 is no power of two, and the spec asks for that (scale_bits=1)"
    assert "of more than 2 significant bits" in (why_not_scale(torch.tensor(0.3), INT8.but(scale_bits=2)) or "")
    assert why_not_scale(torch.tensor(0.3), INT8) is None
    up = to_significant_bits(torch.tensor([0.26, 0.25, 0.3125]), 2, up=True)
    assert up.tolist() == [0.375, 0.25, 0.375]
