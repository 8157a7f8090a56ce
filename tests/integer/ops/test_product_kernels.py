"""Integer products on floating-point kernels: exact up to the limit of float32, whatever torch is set to, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from quantc.integer.ops.product_kernels import BLOCK, FLOAT32_FACTOR, conv, conv_transpose, linear, matmul
from quantc.integer.proof.bounds import centered_by_channel, exact_in_float32_parts

ACCUMULATOR = (None, None, 0, 0, 0, torch.int32)


@contextmanager
def torch_set(threads: int, mkldnn: bool, precision: str) -> Iterator[None]:
    before = torch.get_num_threads(), torch._C._get_mkldnn_enabled(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch._C._set_mkldnn_enabled(before[1])
        torch.set_float32_matmul_precision(before[2])


def heavy(*shape: int, seed: int = 0) -> Tensor:
    """Weights whose sums grow as fast as they can, and odd ones among them that rounding would lose."""
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(draws < 0.9, 127, 1).to(torch.int8)


def bright(*shape: int, seed: int = 1) -> Tensor:
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(draws < 0.9, 255, 1).to(torch.uint8)


SETTINGS = [(1, True, "highest"), (2, True, "medium"), (1, False, "high"), (2, False, "highest")]
KINDS = {  # batch, channels of a group, outputs of a group, groups, size, kernel, stride, dilation
    "alone": (1, 128, 17, 1, 8, 3, 1, 1),
    "as for Winograd": (16, 128, 16, 1, 8, 3, 1, 1),
    "stride": (16, 96, 8, 1, 9, 3, 2, 1),
    "dilation": (2, 96, 8, 1, 9, 3, 1, 2),
    "wide kernel": (1, 24, 8, 1, 9, 7, 1, 1),
    "groups": (2, 80, 8, 2, 6, 3, 1, 1),
    "1x1": (16, 1200, 8, 1, 4, 1, 1, 1),
}


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_are_exact_up_to_the_limit(kind: str, how: tuple[int, bool, str]) -> None:
    batch, inputs, outputs, groups, size, kernel, stride, dilation = KINDS[kind]
    x, w = bright(batch, inputs * groups, size, size), heavy(outputs * groups, inputs, kernel, kernel)
    window = ([stride] * 2, [kernel // 2] * 2, [dilation] * 2, groups)
    expected = torch.conv2d(x.long(), w.long(), None, *window)
    parts = exact_in_float32_parts(centered_by_channel(w, None), 0, 255)
    assert parts > 1
    assert int(expected.max()) > 2**24
    with torch_set(*how):
        found = conv(x, 0, w, None, None, *window, parts, *ACCUMULATOR)
    assert torch.equal(found.long(), expected)


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_transposed_convolutions_are_exact_up_to_the_limit(kind: str, how: tuple[int, bool, str]) -> None:
    batch, inputs, outputs, groups, size, kernel, stride, dilation = KINDS[kind]
    x, w = bright(batch, inputs * groups, size, size), heavy(inputs * groups, outputs, kernel, kernel)
    window = ([stride] * 2, [kernel // 2] * 2, [stride - 1] * 2, groups, [dilation] * 2)
    expected = torch.conv_transpose2d(x.double(), w.double(), None, *window).long()
    parts = exact_in_float32_parts(centered_by_channel(w, None, "transposed", groups), 0, 255)
    assert parts > 1
    with torch_set(*how):
        found = conv_transpose(x, 0, w, None, None, *window, parts, *ACCUMULATOR)
    assert torch.equal(found.long(), expected)


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", [1, 16])
def test_matrices_are_exact_up_to_the_limit(rows: int, how: tuple[int, bool, str]) -> None:
    x, w = bright(rows, 4096), heavy(33, 4096)
    expected = x.long() @ w.long().t()
    parts = exact_in_float32_parts(centered_by_channel(w, None), 0, 255)
    with torch_set(*how):
        assert torch.equal(linear(x, 0, w, None, None, parts, *ACCUMULATOR).long(), expected)
        assert torch.equal(matmul(x, 0, w.t(), None, None, parts, *ACCUMULATOR).long(), expected)
        assert torch.equal(linear(x, 0, w, None, None, 0, *ACCUMULATOR).long(), expected)
        # the limit is one: in a single part it is passed
        assert not torch.equal(linear(x, 0, w, None, None, 1, *ACCUMULATOR).long(), expected)


def test_factors_in_float32_are_what_bfloat16_holds() -> None:
    held = torch.arange(-FLOAT32_FACTOR, FLOAT32_FACTOR + 1).float()
    assert torch.equal(held.bfloat16().float(), held)
    assert torch.tensor(FLOAT32_FACTOR + 1.0).bfloat16().float() != FLOAT32_FACTOR + 1


def integers(shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randint(low, high + 1, shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_results_of_several_blocks_are_in_place() -> None:
    x = integers((3, 2, 300, 301), 0, 255, torch.uint8, 3)
    w = integers((4, 2, 1, 1), -128, 127, torch.int8, 4)
    assert math.prod(x.shape[2:]) > BLOCK
    multiplier = np.array([0.01, 0.02, 0.03, 0.04]).reshape(-1, 1, 1)
    acc = np.einsum("nchw,oc->nohw", x.numpy().astype(np.int64) - 7, w.numpy().astype(np.int64)[:, :, 0, 0])
    expected = np.clip(np.rint(acc * multiplier) + 9, 0, 255).astype(np.uint8)
    window = ([1, 1], [0, 0], [1, 1], 1, 1)
    found = conv(x, 7, w, None, None, *window, torch.from_numpy(multiplier), None, 9, 0, 255, torch.uint8)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_a_later_call_changes_no_earlier_result_and_sees_changed_weights() -> None:
    x, w = integers((5, 8), 0, 255, torch.uint8, 5), integers((6, 8), -127, 127, torch.int8, 6)
    with torch.inference_mode():
        first = linear(x, 0, w, None, None, 1, *ACCUMULATOR)
    before = first.clone()
    expected = x.long() @ -w.long().t()
    w.neg_()
    second = linear(x, 0, w, None, None, 1, *ACCUMULATOR)
    assert torch.equal(first, before)
    assert torch.equal(second.long(), expected)


def test_multipliers_that_go_with_no_channel_are_refused() -> None:
    x, w = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="do not go with 3 channels"):
        linear(x, 0, w, None, None, 1, torch.ones(2, 1), None, 0, 0, 255, torch.uint8)


def test_the_sum_of_the_parts_is_the_sum() -> None:
    x, w = integers((5, 7), -128, 127, torch.int8, 1), integers((3, 7), -128, 127, torch.int8, 2)
    zeros, bias = torch.tensor([4, 0, -9]), torch.tensor([100, -7, 0], dtype=torch.int32)
    expected = (x.long() + 5) @ (w.long() - zeros[:, None]).t() + bias
    for parts in range(8):
        assert torch.equal(linear(x, -5, w, zeros, bias, parts, *ACCUMULATOR).long(), expected)
        assert torch.equal(matmul(x, -5, w.t(), zeros, bias, parts, *ACCUMULATOR).long(), expected)


def test_an_image_without_a_batch_has_none_in_its_result() -> None:
    x, w = integers((4, 6, 6), 0, 255, torch.uint8, 1), integers((4, 3, 2, 2), -128, 127, torch.int8, 2)
    rows = w.transpose(0, 1).contiguous()
    plain = conv(x, 3, rows, None, None, [1, 1], [0, 0], [1, 1], 1, 1, *ACCUMULATOR)
    assert torch.equal(plain.double(), torch.conv2d(x.double() - 3, rows.double()))
    turned = conv_transpose(x, 3, w, None, None, [1, 1], [0, 0], [0, 0], 1, [1, 1], 1, *ACCUMULATOR)
    assert torch.equal(turned.double(), torch.conv_transpose2d(x.double() - 3, w.double()))


def test_sums_of_zeros_have_no_sign() -> None:
    x, w = torch.zeros(2, 1, dtype=torch.int8), torch.tensor([[-3], [-4], [-5]], dtype=torch.int8)
    assert bool(torch.signbit(x.float() @ w.float().t()).all())  # of one product each, torch's zeros are negative
    found = linear(x, 0, w, None, None, 1, torch.tensor(0.5), None, 0, 0, 0, torch.float32)
    assert torch.equal(found, torch.zeros(2, 3))
    assert not bool(torch.signbit(found).any())
