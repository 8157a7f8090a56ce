"""Every product that quantizes what it reads, kernel and reference, against NumPy: bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.integer.library import OPS
from quantc.integer.proof.bounds import Layout, by_channel, exact_in_float32_parts
from quantc.integer.semantics import load
from tests.support import integer_oracle_sums as sums
from tests.support.integer_oracle_dynamic import Array, Chosen, bits

load()
GRIDS = [
    (None, 0, 255, torch.uint8),
    (None, 0, 127, torch.uint8),
    (128, 0, 255, torch.uint8),
    (None, -128, 127, torch.int8),
    (0, -127, 127, torch.int8),
    (None, -32768, 32767, torch.int16),
]
"""Zero point, range and dtype."""
Grid = tuple[int | None, int, int, torch.dtype, float]


def check(name: str, expected: Array, *args: Any) -> None:
    """Kernel and reference give the bits that NumPy says."""
    for function in (OPS[name].reference, OPS[name].target):
        found = function(*args)
        assert found.dtype == torch.float32
        assert tuple(found.shape) == expected.shape
        np.testing.assert_array_equal(bits(found), expected.astype(np.float32).view(np.int32))


def quantized(x: Array, per_token: bool, grid: Grid) -> tuple[Array, Array]:
    """Integers less their zero point, and scales in float64."""
    zero_point, qmin, qmax, _, eps = grid
    chosen = Chosen.of(x, per_token, zero_point, qmin, qmax, eps)
    return chosen.levels(x, qmin, qmax) - chosen.zero_point.astype(np.int64), chosen.scale.astype(np.float64)


def real(acc: Array, step: Array, bias: Array | None) -> Array:
    """Sums with a bias that is rounded to steps, in float64."""
    total = acc.astype(np.float64)
    if bias is not None:
        total = total + np.rint(bias.astype(np.float64) / step)
    result: Array = total * step
    return result


class Draw:
    """What a case is made of."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def one(self, *choices: Any) -> Any:
        return self.data.draw(st.sampled_from(choices))

    def floats(self, *shape: int) -> Array:
        """Around zero or beside it, of all sizes, some with rows that are zero."""
        x = self.rng.normal(self.one(0.0, 3.0, -2.0), self.one(1e-5, 1.0, 1e4), shape).astype(np.float32)
        if self.one(True, False, False) and x.size:
            x[..., 0, :] = 0
        return x

    def grid(self, *, of_bytes: bool = False) -> Grid:
        return (*self.one(*(GRIDS[:-1] if of_bytes else GRIDS)), self.one(2.0**-12, 1e-6, 0.01))

    def weight(self, *shape: int) -> Array:
        return self.rng.integers(-128, 127, shape, np.int8, endpoint=True)

    def by_channel(self, count: int) -> tuple[Array, Array]:
        """Zero points and scales: one for all, or one each."""
        shape = self.one((), (count,))
        zeros = np.asarray(self.rng.integers(-20, 20, shape) * self.one(0, 1))
        return zeros, np.asarray(self.rng.uniform(1e-4, 0.1, shape), np.float32)

    def bias(self, count: int) -> Array | None:
        return self.rng.normal(0, self.one(1, 1e6), count).astype(np.float32) if self.one(True, False) else None


def tensor(value: Array | None) -> Tensor | None:
    return None if value is None else torch.from_numpy(np.asarray(value))


def parts(w: Array, grid: Grid, layout: Layout = "rows", groups: int = 1) -> int:
    """As the lowering works it out: factors beyond 256 are not for float32."""
    span = grid[2] - grid[1]
    found = exact_in_float32_parts(by_channel(torch.from_numpy(w.astype(np.int64)), layout, groups), -span, span)
    return found if max(span, int(np.abs(w.astype(int)).max(initial=0))) <= 256 else 0


# -- matrices --------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_linear(data: st.DataObject) -> None:
    case = Draw(data)
    width, rows, grid, per_token = case.one(1, 7, 80), case.one(1, 5), case.grid(), case.one(True, False)
    x, w, bias = (
        case.floats(*case.one((3, width), (1, width), (2, 3, width))),
        case.weight(rows, width),
        case.bias(rows),
    )
    x = x[0] if case.one(True, False) else x
    zeros, scale = case.by_channel(rows)
    levels, of_x = quantized(x, per_token, grid)
    acc = levels @ (w.astype(np.int64) - zeros.reshape(-1, 1)).T
    given_zeros = tensor(zeros) if zeros.any() else None
    fit = parts(w.astype(np.int64) - zeros.reshape(-1, 1), grid)
    arguments = (tensor(x), tensor(w), given_zeros, tensor(scale), tensor(bias), per_token, *grid)
    for count in (0, fit):
        check("linear_dynamic", real(acc, of_x * scale.astype(np.float64), bias), *arguments, count)


@settings(max_examples=150)
@given(st.data())
def test_a_product_with_a_matrix(data: st.DataObject) -> None:
    case = Draw(data)
    width, columns, grid, per_token = case.one(1, 6, 50), case.one(1, 4), case.grid(), case.one(True, False)
    x, y, bias = case.floats(*case.one((3, width), (1, width), (2, 3, width))), case.weight(width, columns), None
    zeros, scale = case.by_channel(columns)
    alpha = case.one(1.0, 0.3, -2.0)
    if x.ndim == 2:
        bias = case.bias(columns)
    levels, of_x = quantized(x, per_token, grid)
    acc = levels @ (y.astype(np.int64) - zeros)
    given_zeros = tensor(zeros) if zeros.any() else None
    arguments = (tensor(x), tensor(y), given_zeros, tensor(scale), tensor(bias), per_token, *grid, alpha)
    for count in (0, parts(y - zeros, grid, "columns")):
        check("matmul_dynamic", real(acc, of_x * alpha * scale.astype(np.float64), bias), *arguments, count)


@settings(max_examples=150)
@given(st.data())
def test_a_product_of_two_that_come(data: st.DataObject) -> None:
    case = Draw(data)
    width, of_left, of_right = case.one(1, 6, 50), case.grid(), case.grid(of_bytes=True)
    left, right = case.one(
        ((3, width), (width, 2)), ((2, 3, width), (2, width, 4)), ((2, 1, 3, width), (5, width, 2)), ((4, width), (2, width, 1))
    )  # fmt: skip
    x, y, per_token, alpha = case.floats(*left), case.floats(*right), case.one(True, False), case.one(1.0, 0.3, -2.0)
    vector = case.one("x", "y", "both", None)
    x, y = x[(0,) * (x.ndim - 1)] if vector in ("x", "both") else x, y[..., 0] if vector in ("y", "both") else y
    y = y[(0,) * (y.ndim - 1)] if vector in ("y", "both") else y
    (xq, of_x), (yq, of_y) = quantized(x, per_token, of_left), quantized(y, False, of_right)
    acc = np.asarray(xq @ yq)
    scale = of_x[..., 0] if per_token and y.ndim == 1 else of_x
    expected = np.asarray(real(acc, scale * alpha * of_y, None))
    check("matmul_both_dynamic", expected, tensor(x), tensor(y), None, per_token, *of_left, False, *of_right, alpha, 0)


@settings(max_examples=80)
@given(st.data())
def test_linear_of_two_that_come(data: st.DataObject) -> None:
    case = Draw(data)
    width, rows, of_x, of_w = case.one(1, 6, 50), case.one(1, 4), case.grid(), case.grid(of_bytes=True)
    x, w, bias = case.floats(*case.one((3, width), (2, 3, width))), case.floats(rows, width), case.bias(rows)
    tokens = case.one(True, False), case.one(True, False)
    (xq, x_scale), (wq, w_scale) = quantized(x, tokens[0], of_x), quantized(w, tokens[1], of_w)
    step = x_scale * (w_scale.reshape(-1) if w_scale.ndim else w_scale)
    arguments = (tensor(x), tensor(w), tensor(bias), tokens[0], *of_x, tokens[1], *of_w)
    check("linear_both_dynamic", real(xq @ wq.T, step, bias), *arguments)


def test_sums_of_two_that_come_go_in_parts_that_float32_holds() -> None:
    x, y = np.full((2, 700), 255.0, np.float32), np.full((700, 3), 255.0, np.float32)
    grid = (None, 0, 255, torch.uint8, 1e-6)
    for count in (0, 3):
        expected = np.full((2, 3), 700 * 255.0**2)
        check("matmul_both_dynamic", expected, tensor(x), tensor(y), None, False, *grid, False, *grid, 1.0, count)


# -- convolutions ----------------------------------------------------------------------------------------------------


def images(case: Draw, rank: int, channels: int, *, batch: int) -> Array:
    return case.floats(batch, channels, *(case.one(4, 5, 7) for _ in range(rank)))


@settings(max_examples=120)
@given(st.data())
def test_convolutions(data: st.DataObject) -> None:
    case = Draw(data)
    rank, groups, grid = case.one(1, 2, 3), case.one(1, 2), case.grid()
    kernel = [case.one(1, 2, 3) for _ in range(rank)]
    stride, padding = [case.one(1, 2) for _ in range(rank)], [case.one(0, 1) for _ in range(rank)]
    dilation = [case.one(1, 2) if size < 3 else 1 for size in kernel]
    x, w = images(case, rank, 4, batch=case.one(1, 2)), case.weight(6, 4 // groups, *kernel)
    (zeros, scale), bias = case.by_channel(6), case.bias(6)
    levels, of_x = quantized(x, False, grid)
    centered = w.astype(np.int64) - (zeros.reshape(-1, *[1] * (rank + 1)) if zeros.ndim else zeros)
    acc = sums.convolve(levels, centered, stride, padding, dilation, groups)
    expected = real(acc, by_image(of_x * scale, rank), None if bias is None else bias.reshape(-1, *[1] * rank))
    given_zeros = tensor(zeros) if zeros.any() else None
    arguments = (tensor(w), given_zeros, tensor(scale), tensor(bias), stride, padding, dilation, groups, *grid)
    for count in (0, parts(centered, grid)):
        check("conv_dynamic", expected, tensor(x), *arguments, count)
    if len(x) == 1:
        check("conv_dynamic", expected[0], tensor(x[0]), *arguments)


@settings(max_examples=120)
@given(st.data())
def test_transposed_convolutions(data: st.DataObject) -> None:
    case = Draw(data)
    rank, groups, grid = case.one(1, 2, 3), case.one(1, 2), case.grid()
    kernel = [case.one(1, 2, 3) for _ in range(rank)]
    stride, dilation = [case.one(1, 2) for _ in range(rank)], [case.one(1, 2) for _ in range(rank)]
    padding, more = [case.one(0, min(1, size - 1)) for size in kernel], [case.one(0, step - 1) for step in stride]
    x, w = images(case, rank, 4, batch=case.one(1, 2)), case.weight(4, 3, *kernel)
    zeros, one_scale = case.by_channel(3)
    scale = np.tile(one_scale, groups) if one_scale.ndim else one_scale
    bias = case.bias(3 * groups)
    levels, of_x = quantized(x, False, grid)
    centered = w.astype(np.int64) - (zeros.reshape(1, -1, *[1] * rank) if zeros.ndim else zeros)
    acc = sums.convolve_transposed(levels, centered, stride, padding, more, dilation, groups)
    expected = real(acc, by_image(of_x * scale, rank), None if bias is None else bias.reshape(-1, *[1] * rank))
    given_zeros = tensor(zeros) if zeros.any() else None
    arguments = (tensor(w), given_zeros, tensor(scale), tensor(bias), stride, padding, more, groups, dilation, *grid)
    for count in (0, parts(centered, grid, "transposed", groups)):
        check("conv_transpose_dynamic", expected, tensor(x), *arguments, count)


def by_image(step: Array, rank: int) -> Array:
    return step.reshape(-1, *[1] * rank) if step.ndim else step


# -- what is not finite, and what is empty ----------------------------------------------------------------------------

UINT8 = (None, 0, 255, torch.uint8, 2.0**-12)
W = torch.randint(-127, 128, (4, 6), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
KERNEL = torch.randint(-127, 128, (4, 6, 3), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
SCALES = torch.full((4,), 0.01)
BIAS = torch.arange(4.0)


def calls(x: Tensor, per_token: bool) -> dict[str, tuple[Any, ...]]:
    """Calls on three rows of six numbers, or none."""
    image = x.reshape(x.shape[0], 6, 1).expand(-1, -1, 5)
    window: tuple[Any, ...] = ([1], [1], [1], 1)
    found: dict[str, tuple[Any, ...]] = {
        "linear_dynamic": (x, W, None, SCALES, BIAS, per_token, *UINT8),
        "matmul_dynamic": (x, W.t(), None, SCALES, BIAS, per_token, *UINT8),
        "matmul_both_dynamic": (x, torch.ones(6, 4), None, per_token, *UINT8, False, *UINT8),
        "linear_both_dynamic": (x, torch.ones(4, 6), BIAS, per_token, *UINT8, True, *UINT8),
    }
    if not per_token:
        found["conv_dynamic"] = (image, KERNEL, None, SCALES, BIAS, *window, *UINT8)
        turned = KERNEL.transpose(0, 1).contiguous()
        found["conv_transpose_dynamic"] = (image, turned, None, SCALES, BIAS, [1], [1], [0], 1, [1], *UINT8)
    return found


EVERY = [(name, per_token) for per_token in (True, False) for name in calls(torch.zeros(3, 6), per_token)]


@pytest.mark.parametrize(("name", "per_token"), EVERY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_all_that_shares_a_scale_with_what_is_not_finite_is_nan(name: str, per_token: bool, bad: float) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    good = OPS[name].target(*calls(x, per_token)[name])
    x[1, 4] = bad
    for function in (OPS[name].reference, OPS[name].target):
        found = function(*calls(x, per_token)[name])
        if not per_token:
            assert bool(found.isnan().all())
            continue
        assert bool(found[1].isnan().all())
        assert torch.equal(found[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize(("name", "per_token"), EVERY)
def test_an_empty_batch_has_an_empty_result(name: str, per_token: bool) -> None:
    whole = OPS[name].target(*calls(torch.ones(3, 6), per_token)[name])
    for function in (OPS[name].reference, OPS[name].target):
        found = function(*calls(torch.ones(0, 6), per_token)[name])
        assert (found.shape, found.dtype) == ((0, *whole.shape[1:]), torch.float32)


@pytest.mark.parametrize(("name", "per_token"), EVERY)
def test_zeros_give_the_bias_to_within_half_a_step(name: str, per_token: bool) -> None:
    found = OPS[name].target(*calls(torch.zeros(3, 6), per_token)[name])
    bias = torch.zeros(4) if name == "matmul_both_dynamic" else BIAS
    shaped = bias.reshape(-1, 1) if found.dim() == 3 else bias
    assert float((found - shaped).abs().max()) <= 2.0**-12 * 0.01 / 2
    assert not bool((found.signbit() & (found == 0)).any())  # no -0.0, which integers do not have


@pytest.mark.parametrize("name", [name for name, per_token in EVERY if per_token])
def test_a_row_by_itself_is_what_it_is_among_others(name: str) -> None:
    """Rounding a token adds the zero point first, so only rows that have no ties are what a tensor of one row is."""
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
    together = OPS[name].target(*calls(x, True)[name])
    for index in range(3):
        alone = OPS[name].target(*calls(x[index : index + 1], True)[name])
        assert torch.equal(alone, together[index : index + 1])
        if name != "linear_both_dynamic":
            assert torch.equal(OPS[name].target(*calls(x[index : index + 1], False)[name]), alone)


@pytest.mark.parametrize("op", ["linear_dynamic", "matmul_dynamic"])
def test_a_bias_of_less_than_half_a_step_leaves_no_negative_zero(op: str) -> None:
    """Found by a random seed: nothing times a negative weight, and a negative bias of no step."""
    x, w = torch.tensor([[0.0], [-1321.0], [6404.0]]), torch.tensor([[-109]], dtype=torch.int8)
    bias = torch.tensor([-0.7])
    step = np.float64((6404.0 + 1321.0) / 255) * 0.1
    assert abs(bias.item() / step) < 0.5
    for function in (OPS[op].reference, OPS[op].target):
        found = function(x, w, None, torch.tensor(0.1), bias, False, None, 0, 255, torch.uint8, 2.0**-12)
        assert bits(found[0]).tolist() == [0]
