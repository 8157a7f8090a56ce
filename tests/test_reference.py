"""Quantized ops as functions, against NumPy in int64 and float64, and against the formula they correct."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._higher_order_ops.out_dtype import out_dtype

import quantc as qc
from quantc.errors import DataError
from quantc.reference import quantized_add, quantized_conv2d, quantized_linear

Array = np.ndarray[Any, Any]
DTYPES = {"int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16}
aten = torch.ops.aten


def steps(low: float, high: float) -> st.SearchStrategy[float]:
    """Scales: float32 values."""
    return st.floats(low, high, width=32).map(float)


class Draw:
    """Integers, scales and zero points of one case, as NumPy has them."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def levels(self, dtype: str, *shape: int) -> Array:
        limits = np.iinfo(np.dtype(dtype))
        return self.rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)

    def zero(self, dtype: str) -> int:
        limits = np.iinfo(np.dtype(dtype))
        return self.draw(st.integers(int(limits.min), int(limits.max)))

    def of_channels(self, channels: int) -> tuple[Array, Array]:
        """Scales and zero points of a weight: one, or one a channel; symmetric or not."""
        shape = self.draw(st.sampled_from([(), (channels,)]))
        scales = self.rng.uniform(1e-4, 1e-1, shape).astype(np.float32)
        zeros = self.rng.integers(-128, 128, self.draw(st.sampled_from([shape, ()])))
        return np.asarray(scales), np.asarray(zeros * self.draw(st.integers(0, 1)))


def given_as(value: Array) -> Any:
    """A number if it is one, as the signature allows, else a tensor."""
    return value.item() if value.ndim == 0 else torch.from_numpy(value)


def rescaled(acc: Array, multiplier: Array, zero: int, low: int, high: int) -> Array:
    result: Array = np.clip(np.rint(acc.astype(np.float64) * multiplier) + zero, low, high)
    return result


def in_fixed(acc: Array, multiplier: Array, zero: int, low: int, high: int) -> Array:
    """With a mantissa of 31 bits, in Python's integers and fractions."""
    result = np.empty(acc.shape)
    factors = np.broadcast_to(multiplier, acc.shape)
    for place, value in np.ndenumerate(acc):
        fraction, exponent = np.frexp(factors[place])
        mantissa = round(Fraction(float(fraction)) * 2**31)
        exact = Fraction(int(value) * mantissa) * Fraction(2) ** (int(exponent) - 31)
        result[place] = max(low, min(high, round(exact) + zero))
    return result


# -- linear --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_linear_is_what_numpy_says(data: st.DataObject) -> None:
    case = data.draw(st.builds(Draw, st.just(data.draw)))
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    dtype, out = data.draw(st.sampled_from(["int8", "uint8", "int16"])), data.draw(st.sampled_from(["int8", "uint8"]))
    x, x_zero, x_scale = case.levels(dtype, 3, width), case.zero(dtype), data.draw(steps(2**-13, 0.5))
    w = case.levels("int8", rows, width)
    w_scale, w_zero = case.of_channels(rows)
    bias = case.rng.normal(0, 3, rows).astype(np.float32) if data.draw(st.booleans()) else None
    so, zo = data.draw(steps(2**-6, 1)), case.zero(out)

    real = w_scale.astype(np.float64) * x_scale
    acc = (x.astype(np.int64) - x_zero) @ (w.astype(np.int64) - w_zero.reshape(-1, 1)).T
    if bias is not None:
        acc = acc + np.rint(bias.astype(np.float64) / real).astype(np.int64)
    limits = np.iinfo(np.dtype(out))

    def found(**options: Any) -> Array:
        tensors = [torch.from_numpy(item) for item in (x, w)]
        bias_fp32 = None if bias is None else torch.from_numpy(bias)
        weight = (tensors[1], given_as(w_scale), given_as(w_zero))
        result = quantized_linear(tensors[0], x_scale, x_zero, *weight, bias_fp32, so, zo, dtype=DTYPES[out], **options)
        assert result.dtype == DTYPES[out]
        return result.numpy()

    ends = (zo, int(limits.min), int(limits.max))
    np.testing.assert_array_equal(found(), rescaled(acc, real / so, *ends))
    np.testing.assert_array_equal(found(multiplier="fixed"), in_fixed(acc, real / so, *ends))
    np.testing.assert_array_equal(found(qmin=0, qmax=100), rescaled(acc, real / so, zo, 0, 100))


# -- convolution ---------------------------------------------------------------------------------------------------------------


def convolved(x: Array, w: Array, stride: Any, padding: Any, dilation: Any, groups: int) -> Array:
    """A convolution in plain loops, in int64."""
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    batch, inputs, height, width = x.shape
    outputs, _, rows, columns = w.shape
    down = (height - dilation[0] * (rows - 1) - 1) // stride[0] + 1
    across = (width - dilation[1] * (columns - 1) - 1) // stride[1] + 1
    result = np.zeros((batch, outputs, down, across), np.int64)
    for channel, i, j in np.ndindex(outputs, down, across):
        group = channel // (outputs // groups)
        here = x[:, group * (inputs // groups) : (group + 1) * (inputs // groups)]
        top, left = i * stride[0], j * stride[1]
        patch = here[
            :, :, top : top + dilation[0] * rows : dilation[0], left : left + dilation[1] * columns : dilation[1]
        ]
        result[:, channel, i, j] = (patch[:, :, :rows, :columns] * w[channel]).sum(axis=(1, 2, 3))
    return result


@settings(max_examples=80)
@given(st.data())
def test_conv2d_is_what_numpy_says(data: st.DataObject) -> None:
    case = data.draw(st.builds(Draw, st.just(data.draw)))
    groups, kernel = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([(1, 1), (3, 2)]))
    choices: list[list[Any]] = [[1, (2, 1)], [0, (1, 2)], [1, (1, 2)]]
    stride, padding, dilation = (data.draw(st.sampled_from(choice)) for choice in choices)
    dtype = data.draw(st.sampled_from(["int8", "uint8"]))
    x, x_zero, x_scale = case.levels(dtype, 2, 4, 6, 7), case.zero(dtype), data.draw(steps(2**-13, 0.5))
    w = case.levels("int8", 6, 4 // groups, *kernel)
    w_scale, w_zero = case.of_channels(6)
    bias = case.rng.normal(0, 3, 6).astype(np.float32) if data.draw(st.booleans()) else None
    so, zo = data.draw(steps(2**-6, 1)), case.zero(dtype)

    over, around, apart = ((value, value) if isinstance(value, int) else value for value in (stride, padding, dilation))
    real = w_scale.astype(np.float64) * x_scale
    centered = w.astype(np.int64) - w_zero.reshape(-1, 1, 1, 1)
    acc = convolved(x.astype(np.int64) - x_zero, centered, over, around, apart, groups)
    if bias is not None:
        acc = acc + np.broadcast_to(np.rint(bias.astype(np.float64) / real), 6).astype(np.int64).reshape(-1, 1, 1)
    multiplier = (real / so).reshape(-1, 1, 1)
    limits = np.iinfo(np.dtype(dtype))

    found = quantized_conv2d(
        torch.from_numpy(x),
        x_scale,
        x_zero,
        torch.from_numpy(w),
        given_as(w_scale),
        given_as(w_zero),
        None if bias is None else torch.from_numpy(bias),
        so,
        zo,
        stride,
        padding,
        dilation,
        groups,
    )
    assert found.dtype == DTYPES[dtype]
    expected = rescaled(acc, multiplier, zo, int(limits.min), int(limits.max))
    np.testing.assert_array_equal(found.numpy(), expected)


# -- sum -------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_add_is_what_numpy_says(data: st.DataObject) -> None:
    case = data.draw(st.builds(Draw, st.just(data.draw)))
    dtype = data.draw(st.sampled_from(["int8", "uint8"]))
    x, y = case.levels(dtype, 4, 9), case.levels(dtype, *data.draw(st.sampled_from([(4, 9), (1, 9), (9,)])))
    x_zero, y_zero, zo = (case.zero(dtype) for _ in range(3))
    x_scale, y_scale, so = (data.draw(steps(2**-12, 1)) for _ in range(3))
    limits = np.iinfo(np.dtype(dtype))
    total = (x.astype(np.float64) - x_zero) * (x_scale / so) + (y.astype(np.float64) - y_zero) * (y_scale / so)
    expected = np.clip(np.rint(total) + zo, limits.min, limits.max)
    arguments = (torch.from_numpy(x), x_scale, x_zero, torch.from_numpy(y), y_scale, y_zero, so, zo)
    np.testing.assert_array_equal(quantized_add(*arguments).numpy(), expected)
    in_fixed_form = quantized_add(*arguments, multiplier="fixed").numpy().astype(np.int64)
    far_from_a_tie = np.abs(total - np.floor(total) - 0.5) > 1e-4
    assert (in_fixed_form == expected)[far_from_a_tie].all()
    assert np.abs(in_fixed_form - expected).max() <= 1


# -- the formula that is corrected ---------------------------------------------------------------------------------------------


def layer() -> dict[str, Any]:
    """A linear layer and activations as they come, on int8 grids."""
    generator = torch.Generator().manual_seed(0)
    w, b = (torch.empty(64, 64), torch.empty(64))
    for item in (w, b):
        item.uniform_(-0.125, 0.125, generator=generator)
    x = torch.randn(256, 64, generator=generator).relu()
    y = x @ w.t() + b
    scales = [float(value) for value in (x.max() / 255, w.abs().max() / 127, (y.max() - y.min()) / 255)]
    sx, sw, so = scales
    quantized = [(torch.round(t / s) + z).clamp(-128, 127).to(torch.int8) for t, s, z in ((x, sx, -128), (w, sw, 0))]
    zo = int(-128 - torch.round(y.min() / so))
    real = (quantized[0].double() + 128) * sx @ (quantized[1].double() * sw).t() + b.double()
    return {"x": quantized[0], "w": quantized[1], "b": b, "sx": sx, "sw": sw, "so": so, "zo": zo, "real": real}


def wrong(found: Tensor, case: dict[str, Any]) -> tuple[float, int]:
    """How many results are not the nearest level to the real number, and how far off the worst is."""
    nearest = (torch.round(case["real"] / case["so"]) + case["zo"]).clamp(-128, 127)
    distance = (found.double() - nearest).abs()
    return float((distance > 0).double().mean()), int(distance.max())


def as_sketched(case: dict[str, Any], *, transposed: bool, bias_factor: float) -> Tensor:
    """The sketch that the integer form began with: each part rescaled by `out_dtype(mul)`, then added."""
    x, w = case["x"].to(torch.int16) + 128, case["w"].to(torch.int16)
    acc = out_dtype(aten.mm.default, torch.int32, x, w.t() if transposed else w)
    rescaled_acc = out_dtype(aten.mul.Scalar, torch.int32, acc, case["sx"] * case["sw"] / case["so"])
    bias = out_dtype(aten.mul.Tensor, torch.int32, case["b"], torch.tensor(bias_factor))
    return torch.clamp(rescaled_acc + bias + case["zo"], -128, 127).to(torch.int8)


def test_each_correction_of_the_sketch_is_needed() -> None:
    case = layer()
    multiplied, divided = case["sx"] * case["sw"] / case["so"], 1 / case["so"]
    verbatim = wrong(as_sketched(case, transposed=False, bias_factor=multiplied), case)
    transposed = wrong(as_sketched(case, transposed=True, bias_factor=multiplied), case)
    bias_divided = wrong(as_sketched(case, transposed=True, bias_factor=divided), case)
    acc = (case["x"].double() + 128) @ case["w"].double().t() * multiplied
    rounded_twice = torch.round(acc) + torch.round(case["b"].double() / case["so"]) + case["zo"]
    apart = wrong(rounded_twice.clamp(-128, 127), case)
    ours = wrong(
        quantized_linear(case["x"], case["sx"], -128, case["w"], case["sw"], 0, case["b"], case["so"], case["zo"]),
        case,
    )
    assert verbatim[0] > 0.9
    assert verbatim[1] > 20
    assert transposed[0] > 0.8
    assert transposed[1] > 2
    assert 0.4 < bias_divided[0] < 0.7
    assert bias_divided[1] == 2
    assert 0.15 < apart[0] < 0.35
    assert apart[1] == 1
    assert ours[0] < 0.002
    assert ours[1] <= 1


def test_out_dtype_of_a_product_truncates() -> None:
    """Which is why `out_dtype` serves products of matrices and convolutions, and rescaling multiplies in float64."""
    found = out_dtype(aten.mul.Scalar, torch.int32, torch.tensor([7, -7, 6], dtype=torch.int32), 0.25)
    assert found.tolist() == [1, -1, 1]
    ours = quantized_linear(
        torch.tensor([[7], [-7], [6]], dtype=torch.int8),
        0.25,
        0,
        torch.ones(1, 1, dtype=torch.int8),
        1.0,
        0,
        None,
        1.0,
        0,
    )
    assert ours.flatten().tolist() == [2, -2, 2]


# -- refusals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x_int8": torch.zeros(2, 4)}, "x is torch.float32"),
        ({"x_scale": 0.0}, "the scale of x is not a positive number"),
        ({"x_scale": torch.ones(2)}, "x of shape"),
        ({"weight_scale": torch.ones(4)}, "weight of shape"),
        ({"weight_scale": torch.tensor([1.0, float("nan"), 1.0])}, "the scale of weight is not a positive number"),
        ({"x_zero_point": 200}, "a zero point of x is outside -128..127"),
        ({"output_zero_point": -129}, "a zero point of the output"),
        ({"qmin": -300}, "-300..127 is not a range of torch.int8"),
        ({"bias_fp32": torch.tensor([1e30, 0.0, 0.0])}, "more than 2"),
        ({"dtype": torch.float32}, "the output is torch.float32"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], reason: str) -> None:
    arguments: dict[str, Any] = {
        "x_int8": torch.zeros(2, 4, dtype=torch.int8),
        "x_scale": 0.5,
        "x_zero_point": 0,
        "weight_int8": torch.zeros(3, 4, dtype=torch.int8),
        "weight_scale": torch.ones(3),
        "weight_zero_point": 0,
        "bias_fp32": None,
        "output_scale": 0.5,
        "output_zero_point": 0,
    }
    assert qc.reference.quantized_linear(**arguments).shape == (2, 3)
    with pytest.raises(DataError) as caught:
        qc.reference.quantized_linear(**{**arguments, **changes})
    assert reason in caught.value.what


def test_sums_that_32_bits_might_not_hold_are_refused() -> None:
    x, w = torch.zeros(1, 40000, dtype=torch.uint8), torch.full((1, 40000), 127, dtype=torch.int8)
    assert quantized_linear(x, 1.0, 0, w, 1.0, 0, None, 1.0, 0).item() == 0
    with pytest.raises(DataError, match="could need 33 bits"):
        quantized_linear(x.repeat(1, 2), 1.0, 0, w.repeat(1, 2), 1.0, 0, None, 1.0, 0)


def test_a_multiplier_that_there_is_not() -> None:
    x = torch.ones(1, 2, dtype=torch.int8)
    with pytest.raises(DataError, match="unknown multiplier of the form 'Fixed'"):
        quantized_linear(x, 0.1, 0, x, 0.1, 0, None, 0.1, 0, multiplier="Fixed")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="unknown multiplier of the form 'Fixed'"):
        quantized_add(x, 0.1, 0, x, 0.1, 0, 0.1, 0, multiplier="Fixed")  # type: ignore[arg-type]


def test_a_bias_of_another_length() -> None:
    x, w = torch.ones(1, 2, dtype=torch.int8), torch.ones(3, 2, dtype=torch.int8)
    with pytest.raises(DataError, match="the bias has the shape"):
        quantized_linear(x, 0.1, 0, w, 0.1, 0, torch.tensor([1.0]), 0.1, 0)
