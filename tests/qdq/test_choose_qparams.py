"""Scales that are found as the program runs, against torch's ops, torch's observers and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

from quantc.integer.ops.dynamic_kernels import _levels
from quantc.integer.qdq_decomposition import SPELLED
from quantc.qdq.choose_qparams import CHOOSE, choose_qparams, quantize_tensor
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import DType, Scheme
from quantc.spec.numerics import middle, qparams_from_range
from quantc.spec.spec import QuantSpec
from tests.support.integer_oracle_dynamic import Array, Chosen

ops = decomposed_ops()
GRIDS = {
    "uint8": (0, 255, torch.uint8),
    "uint8 to 127": (0, 127, torch.uint8),
    "int8": (-128, 127, torch.int8),
    "int8 narrow": (-127, 127, torch.int8),
    "int16": (-32768, 32767, torch.int16),
}
EPS = (2.0**-12, 2.0**-14, 1e-5, 2.0**-23, 0.3)
numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.5, 255.0])
grids = st.sampled_from(list(GRIDS.values()))
eight_bit_grids = st.sampled_from([grid for grid in GRIDS.values() if grid[2] != torch.int16])
shapes = st.sampled_from([(1,), (7,), (1, 5), (3, 4), (2, 3, 4), (2, 1, 1)])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    drawn = draw(arrays.arrays(np.float32, draw(shapes), elements=numbers))
    shift = draw(st.sampled_from([None, "up", "down"]))
    drawn = np.abs(drawn) if shift == "up" else -np.abs(drawn) if shift == "down" else drawn
    return torch.from_numpy(np.ascontiguousarray(drawn, np.float32))


def spec_of(qmin: int, qmax: int, dtype: torch.dtype, eps: float, scheme: Scheme) -> QuantSpec:
    name = {torch.uint8: DType.UINT8, torch.int8: DType.INT8, torch.int16: DType.INT16}[dtype]
    return QuantSpec(dtype=name, qmin=qmin, qmax=qmax, eps=eps, scheme=scheme)


@settings(max_examples=300)
@given(tensors(), grids, st.sampled_from(EPS), st.sampled_from(Scheme))
def test_scales_are_those_of_the_ranges_to_the_last_bit(x: Tensor, grid: Any, eps: float, scheme: Scheme) -> None:
    spec = spec_of(grid[0], grid[1], grid[2], eps, scheme)
    expected = qparams_from_range(x.min(), x.max(), spec)
    zero_point = middle(spec) if scheme is Scheme.SYMMETRIC else None
    for choose in (choose_qparams, CHOOSE):
        scale, zero = choose(x, False, zero_point, grid[0], grid[1], eps)
        assert (scale.dtype, zero.dtype, scale.shape, zero.shape) == (torch.float32, torch.int32, (), ())
        assert torch.equal(scale, expected.scale)
        assert torch.equal(zero.long(), expected.zero_point)


@settings(max_examples=300)
@given(tensors(), eight_bit_grids, st.sampled_from(EPS))
def test_torchs_choice_is_the_same_number_and_is_spelled_out_with_its_bits(x: Tensor, grid: Any, eps: float) -> None:
    qmin, qmax, dtype = grid
    scale, zero = choose_qparams(x, False, None, qmin, qmax, eps)
    theirs = ops.choose_qparams.tensor(x, qmin, qmax, eps, dtype)
    ours = SPELLED["choose_qparams.tensor"](x, qmin, qmax, eps, dtype)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    assert scale.double() == theirs[0]
    assert zero.long() == theirs[1]
    levels = ops.quantize_per_tensor.tensor(x, *theirs, qmin, qmax, dtype)
    assert torch.equal(quantize_tensor(x, scale, zero, False, qmin, qmax, dtype), levels)
    assert torch.equal(SPELLED["quantize_per_tensor.tensor"](x, *ours, qmin, qmax, dtype), levels)
    back = SPELLED["dequantize_per_tensor.tensor"](levels, *ours, qmin, qmax, dtype)
    assert torch.equal(back, ops.dequantize_per_tensor.tensor(levels, *theirs, qmin, qmax, dtype))


@settings(max_examples=200)
@given(tensors(), grids, st.sampled_from(EPS), st.sampled_from(Scheme), st.booleans())
def test_levels_are_what_numpy_says(x: Tensor, grid: Any, eps: float, scheme: Scheme, per_token: bool) -> None:
    qmin, qmax, dtype = grid
    zero_point = None if scheme is Scheme.AFFINE else (qmin + qmax + 1) // 2
    theirs = Chosen.of(x.numpy(), per_token, zero_point, qmin, qmax, eps)
    scale, zero = choose_qparams(x, per_token, zero_point, qmin, qmax, eps)
    assert np.array_equal(scale.numpy(), theirs.scale)
    assert np.array_equal(zero.numpy(), theirs.zero_point.astype(np.int32))
    expected = theirs.levels(x.numpy(), qmin, qmax)
    assert np.array_equal(quantize_tensor(x, scale, zero, per_token, qmin, qmax, dtype).numpy(), expected)
    fast, fast_scale = _levels(x, per_token, zero_point, qmin, qmax, dtype, eps)
    assert torch.equal(fast_scale, scale)
    assert np.array_equal(fast.numpy(), expected - theirs.zero_point.astype(np.int64))
    if per_token:
        assert torch.equal(
            ops.quantize_per_token(x, scale, zero, qmin, qmax, dtype), torch.from_numpy(expected).to(dtype)
        )


@settings(max_examples=100)
@given(tensors(), grids, st.sampled_from(EPS), st.sampled_from(Scheme))
def test_scales_of_tokens_are_those_of_their_rows_alone(x: Tensor, grid: Any, eps: float, scheme: Scheme) -> None:
    qmin, qmax, _ = grid
    zero_point = None if scheme is Scheme.AFFINE else (qmin + qmax + 1) // 2
    scales, zeros = choose_qparams(x, True, zero_point, qmin, qmax, eps)
    assert scales.shape == zeros.shape == (*x.shape[:-1], 1)
    rows = x.reshape(-1, x.shape[-1])
    alone = [choose_qparams(row, False, zero_point, qmin, qmax, eps) for row in rows]
    assert torch.equal(scales.flatten(), torch.stack([scale for scale, _ in alone]))
    assert torch.equal(zeros.flatten(), torch.stack([zero for _, zero in alone]))


@pytest.mark.parametrize(
    ("grid", "name"), [((0, 255, torch.uint8), torch.quint8), ((-128, 127, torch.int8), torch.qint8)]
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_scales_are_those_of_torchs_observer(grid: Any, name: torch.dtype, symmetric: bool) -> None:
    scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    for seed in range(20):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 10) + (seed % 3 - 1)
        observer = MinMaxObserver(dtype=name, qscheme=scheme, eps=2.0**-12)
        observer(x)
        scale, zero = observer.calculate_qparams()
        middle_of_it = (128 if name is torch.quint8 else 0) if symmetric else None
        found = choose_qparams(x, False, middle_of_it, grid[0], grid[1], 2.0**-12)
        assert found[0] == scale
        assert found[1] == zero


# -- torch's choices ------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(tensors(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_all_of_torchs_choices_are_spelled_out_with_their_bits(x: Tensor, dtype: torch.dtype) -> None:
    x = x.clamp(-6e4, 6e4).to(dtype)
    cases = [
        (ops.choose_qparams.tensor, (x, 0, 255, 1e-4, torch.uint8)),
        (ops.choose_qparams.tensor, (x, -127, 127, 1e-3, torch.int8)),
        (ops.choose_qparams_symmetric.tensor, (x, 0, 255, 1e-4, torch.uint8)),
        (ops.choose_qparams_symmetric.tensor, (x, -127, 127, 1e-4, torch.int8)),
        (ops.choose_qparams_per_token.default, (x, torch.int8)),
        (ops.choose_qparams_per_token_asymmetric.default, (x, torch.int8)),
    ]
    for op, arguments in cases:
        ours, theirs = SPELLED[str(op).removeprefix("quantized_decomposed.")](*arguments), op(*arguments)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)


# -- what has no range ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_point", [None, 128])
@pytest.mark.parametrize("bad", [[float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]])
def test_what_is_not_finite_has_no_scale_and_its_neighbours_have_theirs(zero_point: Any, bad: list[float]) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    rest = choose_qparams(x[[0, 1, 3]], True, zero_point, 0, 255, 2.0**-12)
    x[2, : len(bad)] = torch.tensor(bad)
    scales, zeros = choose_qparams(x, True, zero_point, 0, 255, 2.0**-12)
    assert scales.isnan().flatten().tolist() == [False, False, True, False]
    assert torch.equal(scales[[0, 1, 3]], rest[0])
    assert torch.equal(zeros[[0, 1, 3]], rest[1])
    assert choose_qparams(x, False, zero_point, 0, 255, 2.0**-12)[0].isnan()


def test_a_range_that_float32_cannot_measure_has_no_scale() -> None:
    x = torch.tensor([3e38, -3e38])
    assert choose_qparams(x, False, None, 0, 255, 2.0**-12)[0].isnan()
    assert choose_qparams(x, False, 128, 0, 255, 2.0**-12)[0].isfinite()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,), (2, 0, 5), (0, 0)])
@pytest.mark.parametrize("zero_point", [None, 128])
def test_what_is_empty_has_the_smallest_scale(shape: tuple[int, ...], zero_point: int | None) -> None:
    x = torch.zeros(shape)
    scale, zero = choose_qparams(x, False, zero_point, 0, 255, 0.25)
    assert scale == 0.25
    assert zero == (0 if zero_point is None else 128)
    scales, zeros = choose_qparams(x, True, zero_point, 0, 255, 0.25)
    assert scales.shape == zeros.shape == (*shape[:-1], 1)
    assert bool((scales == 0.25).all())


def test_a_single_number_has_a_scale() -> None:
    scale, zero = choose_qparams(torch.tensor(-5.1), False, None, 0, 255, 1e-6)
    expected: Array = np.float32(5.1) / np.float32(255)  # type: ignore[assignment]
    assert scale.item() == expected
    assert zero == 255


def test_no_size_is_asked_for_so_a_batch_can_be_dynamic() -> None:
    class Choice(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return CHOOSE(x, False, None, 0, 255, 1e-6), CHOOSE(x, True, 128, 0, 255, 1e-6)

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    batch = torch.export.Dim("batch", min=0, max=64)
    exported = torch.export.export(Choice(), (x,), dynamic_shapes=({0: batch},)).run_decompositions().module()
    for rows in (0, 1, 5, 9):
        given_now = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        for one, other in zip(exported(given_now), Choice()(given_now), strict=True):
            assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


# -- on tensors by hand ----------------------------------------------------------------------------------------------

SMALLEST = 2.0**-12
BYTES = [(0, 255, torch.uint8), (-128, 127, torch.int8), (-127, 127, torch.int8), (0, 127, torch.uint8)]


def by_hand() -> list[Tensor]:
    """Around zero, to one side of it, all zero, tiny, of very different sizes."""
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    return [x, x.abs() + 3, -x.abs(), torch.zeros(2, 5), x * 1e-6, x * torch.logspace(-9, 9, 7).unsqueeze(1), x * 0 + 2]


@pytest.mark.parametrize(("qmin", "qmax", "dtype"), BYTES, ids=str)
@pytest.mark.parametrize("index", range(7))
def test_scales_of_tensors_are_torchs(qmin: int, qmax: int, dtype: torch.dtype, index: int) -> None:
    x = by_hand()[index]
    scale, zero_point = choose_qparams(x, False, None, qmin, qmax, SMALLEST)
    theirs, their_zero = ops.choose_qparams.tensor(x, qmin, qmax, SMALLEST, dtype)
    assert scale.dtype == torch.float32
    assert scale.item() == theirs.item()
    assert zero_point.item() == their_zero.item()
    expected = ops.quantize_per_tensor.tensor(x, theirs, their_zero, qmin, qmax, dtype)
    assert torch.equal(quantize_tensor(x, scale, zero_point, False, qmin, qmax, dtype), expected)


@pytest.mark.parametrize(("qmin", "qmax", "dtype"), BYTES[:2], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("index", range(7))
def test_scales_of_tokens_are_those_of_torchs_observer_of_rows(
    qmin: int, qmax: int, dtype: torch.dtype, symmetric: bool, index: int
) -> None:
    x = by_hand()[index]
    scheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    observer = PerChannelMinMaxObserver(ch_axis=0, dtype=dtype, qscheme=scheme, eps=SMALLEST)
    observer(x)
    theirs, their_zero = observer.calculate_qparams()
    middle = 128 if dtype == torch.uint8 else 0
    scale, zero_point = choose_qparams(x, True, middle if symmetric else None, qmin, qmax, SMALLEST)
    assert torch.equal(scale.flatten(), theirs)
    assert torch.equal(zero_point.flatten().long(), their_zero.long())
    expected = ops.quantize_per_token(x, scale, zero_point, qmin, qmax, dtype)
    assert torch.equal(quantize_tensor(x, scale, zero_point, True, qmin, qmax, dtype), expected)
