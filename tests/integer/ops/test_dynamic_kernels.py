"""The kernels of products that quantize what they read: linear layers against NumPy, all of them against their references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from quantc.integer.library import OPS
from quantc.integer.ops import dynamic_kernels
from quantc.integer.ops.dynamic import linear_dynamic
from quantc.integer.ops.product_kernels import BLOCK

TARGET = OPS["linear_dynamic"].target
EPS = 2.0**-12
GRIDS = [(0, 255, torch.uint8), (-128, 127, torch.int8), (-127, 127, torch.int8), (0, 127, torch.uint8)]
Array = np.ndarray[Any, Any]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def oracle(x: Array, case: dict[str, Any]) -> Array:
    """The formula in NumPy: float32 for scales and levels as torch has them, int64 for sums, float64 for the result."""
    qmin, qmax, one = case["qmin"], case["qmax"], np.float32
    axis = -1 if case["per_token"] else None
    low = np.minimum(x.min(axis=axis, keepdims=True), one(0))
    high = np.maximum(x.max(axis=axis, keepdims=True), one(0))
    if case["zero"] is None:
        scale = np.maximum((high - low) / one(qmax - qmin), one(EPS))
        zero = np.clip(qmin - np.rint(low / scale), qmin, qmax)
    else:
        scale = np.maximum(np.maximum(-low, high) / one((qmax - qmin) / 2), one(EPS))
        zero = np.full_like(scale, case["zero"])
    steps = x * (one(1) / scale)
    levels = np.rint(steps + zero) if case["per_token"] else np.rint(steps) + zero
    centered = (np.clip(levels, qmin, qmax) - zero).astype(np.int64)
    acc = centered @ (case["w"].astype(np.int64) - np.reshape(case["w_zero"], (-1, 1))).T
    step = scale.astype(np.float64) * case["w_scale"].astype(np.float64)
    if case["bias"] is not None:
        acc = acc + np.rint(case["bias"].astype(np.float64) / step).astype(np.int64)
    result: Array = (acc.astype(np.float64) * step).astype(np.float32)
    return result


@st.composite
def cases(draw: st.DrawFn) -> tuple[Array, dict[str, Any]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 80))
    qmin, qmax, dtype = draw(st.sampled_from(GRIDS))
    lead = draw(st.sampled_from([(), (1,), (5,), (2, 3)]))
    x = rng.normal(draw(st.sampled_from([0.0, 3.0])), draw(st.sampled_from([1e-5, 1.0, 1e4])), (*lead, width))
    by_row = draw(st.booleans())
    zeros = rng.integers(-20, 20, rows if by_row else ()) * draw(st.integers(0, 1))
    return x.astype(np.float32), {
        "w": rng.integers(-128, 127, (rows, width), np.int8, endpoint=True),
        "w_zero": np.asarray(zeros),
        "w_scale": np.asarray(rng.uniform(1e-4, 1e-1, rows if by_row else ()), np.float32),
        "bias": rng.normal(0, 10, rows).astype(np.float32) if draw(st.booleans()) else None,
        "per_token": draw(st.booleans()),
        "zero": draw(st.sampled_from([None, (qmin + qmax + 1) // 2])),
        "qmin": qmin,
        "qmax": qmax,
        "dtype": dtype,
    }


def given_to_the_op(x: Array, case: dict[str, Any]) -> tuple[Any, ...]:
    tensor = {name: torch.from_numpy(value) for name, value in case.items() if isinstance(value, np.ndarray)}
    zeros = tensor["w_zero"] if case["w_zero"].any() else None
    head = (torch.from_numpy(x), tensor["w"], zeros, tensor["w_scale"], tensor.get("bias"))
    return (*head, case["per_token"], case["zero"], case["qmin"], case["qmax"], case["dtype"], EPS)


@settings(max_examples=200)
@given(cases())
def test_it_is_what_numpy_says_bit_for_bit(drawn: tuple[Array, dict[str, Any]]) -> None:
    expected = oracle(*drawn)
    for function in (linear_dynamic, TARGET):
        found = function(*given_to_the_op(*drawn)).numpy()
        np.testing.assert_array_equal(found.view(np.int32), expected.reshape(found.shape).view(np.int32))


def plain(x: Tensor, *, bias: Tensor | None = None, per_token: bool = False) -> tuple[Any, ...]:
    w = torch.randint(-127, 128, (4, x.shape[-1]), dtype=torch.int8, generator=seeded(2))
    return x, w, None, torch.full((4,), 0.01), bias, per_token, None, -128, 127, torch.int8, EPS


@pytest.mark.parametrize("per_token", [True, False])
def test_it_is_near_the_product_in_float(per_token: bool) -> None:
    x, bias = torch.randn(50, 64, generator=seeded(3)), torch.randn(4, generator=seeded(4))
    arguments = plain(x, bias=bias, per_token=per_token)
    real = x @ (arguments[1].float() * 0.01).t() + bias
    noise = (TARGET(*arguments) - real).pow(2).mean()
    assert 10 * torch.log10(real.pow(2).mean() / noise) > 40


def test_a_bias_of_more_steps_than_an_int32_holds_is_added_all_the_same() -> None:
    x, bias = torch.zeros(3, 8), torch.tensor([1e6, -1e7, 3.0, 1e8])
    for function in (linear_dynamic, TARGET):
        assert torch.equal(function(*plain(x, bias=bias)), bias.expand(3, 4))


def test_what_is_not_finite_stays_so() -> None:
    x = torch.randn(3, 8, generator=seeded(5))
    x[1, 2] = torch.nan
    whole, tokens = TARGET(*plain(x)), TARGET(*plain(x, per_token=True))
    assert whole.isnan().all()
    assert tokens.isnan().any(dim=1).tolist() == [False, True, False]


def test_each_token_has_its_own_scale() -> None:
    x = torch.randn(4, 16, generator=seeded(6))
    alone = torch.cat([TARGET(*plain(x[index : index + 1])) for index in range(4)])
    together = TARGET(*plain(x, per_token=True))
    others = TARGET(*plain(torch.cat([x, x[:1] * 1000]), per_token=True))[:4]
    assert torch.equal(together, others)
    assert not torch.equal(TARGET(*plain(torch.cat([x, x[:1] * 1000])))[:4], alone)


def test_it_is_traced_into_aten_ops_exported_and_compiled() -> None:
    x, bias = torch.randn(2, 5, 16, generator=seeded(7)), torch.ones(4)
    arguments = plain(x, bias=bias, per_token=True)

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return TARGET(x, *arguments[1:])

    expected = TARGET(*arguments)
    traced = make_fx(lambda x: linear_dynamic(x, *arguments[1:]))(x)
    assert torch.equal(traced(x), expected)
    assert torch.equal(torch.export.export(Layer(), (x,)).module()(x), expected)
    assert torch.equal(torch.compile(Layer())(x), expected)


# -- kernels beside references -------------------------------------------------------------------------------------

SIGNED = (None, -128, 127, torch.int8, EPS)
AROUND = (0, -127, 127, torch.int8, EPS)


def weight(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=seeded(8))


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(9))


SCALES, ZEROS, BIAS = torch.tensor([0.01, 0.3, 0.02]), torch.tensor([4, 0, -3]), torch.tensor([1.0, -2.0, 0.5])
IMAGE = ([2, 1], [1, 0], [1, 2], 1)
CALLS: dict[str, tuple[Any, ...]] = {
    "linear_dynamic": (floats(4, 6), weight(3, 6), ZEROS, SCALES, BIAS, True, *SIGNED),
    "matmul_dynamic": (floats(2, 4, 6), weight(6, 3), ZEROS, SCALES, BIAS, False, *AROUND, -0.5),
    "conv_dynamic": (floats(2, 2, 7, 7), weight(3, 2, 3, 2), ZEROS, SCALES, BIAS, *IMAGE, *SIGNED),
    "conv_transpose_dynamic": (
        floats(2, 7, 7),
        weight(2, 3, 3, 2),
        ZEROS,
        SCALES,
        BIAS,
        *([2, 2], [1, 0], [1, 0], 1, [1, 1]),
        *AROUND,
    ),
    "linear_both_dynamic": (floats(4, 6), floats(3, 6), BIAS, True, *SIGNED, True, *AROUND),
    "matmul_both_dynamic": (floats(4, 6), floats(6), None, True, *SIGNED, False, *AROUND, 2.0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("parts", [None, 0, 1, 2])
def test_a_kernel_has_the_bits_of_its_reference(name: str, parts: int | None) -> None:
    """torch leaves out arguments that have their default: `alpha` before `parts`, or both."""
    args = CALLS[name]
    if parts is not None:
        args = (*args, parts)
    kernel, reference = OPS[name].kernel, OPS[name].reference
    assert kernel is not None
    expected, found = reference(*args), kernel(*args)
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_rows_of_several_blocks_are_in_place() -> None:
    width = 300
    rows = 2 * (BLOCK // width) + 5
    x, w = floats(rows, 4) * torch.logspace(-2, 2, rows).unsqueeze(1), weight(width, 4)
    args = (x, w, None, torch.rand(width, generator=seeded(1)), floats(width), True, *SIGNED)
    assert torch.equal(dynamic_kernels.linear(*args), linear_dynamic(*args))


def test_what_is_read_stays_as_it_was() -> None:
    for name, args in CALLS.items():
        before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        OPS[name].target(*args)
        pairs = zip(before, args, strict=True)
        assert all(torch.equal(old, new) for old, new in pairs if isinstance(old, Tensor)), name
