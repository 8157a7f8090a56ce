"""Weight packing, and torch's quantized dtypes behind plain integers: each function against torch in float, or integers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.errors import MissingDependencyError
from quantc.targets.kernels import packing
from tests.support.stored_weights import needs_fbgemm

ENGINES = torch.backends.quantized.supported_engines
needs_qnnpack = pytest.mark.skipif("qnnpack" not in ENGINES, reason="this build of torch has no QNNPACK")
WEIGHT = torch.randint(-60, 61, (5, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
"""Small enough for sums of two products to fit 16 bits, where processors add them there."""
ROWS = torch.randint(0, 256, (3, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


# -- engines -----------------------------------------------------------------------------------------------------------


@needs_qnnpack
def test_the_engine_is_put_back_also_after_an_error() -> None:
    before = torch.backends.quantized.engine
    with packing.engine("qnnpack"):
        assert torch.backends.quantized.engine == "qnnpack"
    assert torch.backends.quantized.engine == before

    def broken() -> None:
        with packing.engine("qnnpack"):
            raise KeyError("broken")

    with pytest.raises(KeyError):
        broken()
    assert torch.backends.quantized.engine == before


def test_an_engine_that_torch_has_not_is_named_with_those_it_has() -> None:
    with pytest.raises(MissingDependencyError, match="'abacus'") as caught, packing.engine("abacus"):
        pass
    assert ENGINES[-1] in str(caught.value.advice)


@needs_qnnpack
@needs_fbgemm
def test_threads_do_not_change_the_engine_of_each_other() -> None:
    seen: list[bool] = []

    def use(name: str) -> None:
        for _ in range(30):
            with packing.engine(name):
                seen.append(torch.backends.quantized.engine == name)

    threads = [threading.Thread(target=use, args=(name,)) for name in ("qnnpack", "fbgemm") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen)


def test_torchs_warning_is_used_up_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packing.hush()
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


# -- bytes as quantized tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("affine", [False, True])
def test_integers_and_scales_are_the_numbers_they_stand_for(axis: int, affine: bool) -> None:
    scale = torch.arange(1, WEIGHT.shape[axis] + 1) * 0.5
    zeros = torch.arange(WEIGHT.shape[axis]) - 3 if affine else None
    along = [-1, 1] if axis == 0 else [1, -1]
    offset = 0 if zeros is None else zeros.reshape(along)
    found = packing.quantized_weight(WEIGHT, scale, axis, zeros)
    assert torch.equal(found.dequantize(), ((WEIGHT.int() - offset) * scale.reshape(along)).float())


def test_one_scale_makes_a_tensor_of_one_scale() -> None:
    found = packing.quantized_weight(WEIGHT, torch.tensor(0.25), zero_points=torch.tensor(2))
    assert torch.equal(found.dequantize(), (WEIGHT.int() - 2) * 0.25)


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.uint8, 0, 255), (torch.int8, -128, 127)])
def test_floats_are_rounded_to_even_and_cut_off(dtype: torch.dtype, low: int, high: int) -> None:
    x = torch.tensor([-1e9, -1.0, -0.5, 0.0, 0.25, 0.75, 1.0, 1e9])
    steps = np.clip(np.rint(x.double().numpy() / 0.5) + 2, low, high)
    found = packing.to_bytes(x, 0.5, 2, dtype)
    assert found.dtype is dtype
    assert found.tolist() == steps.astype(int).tolist()


def test_bytes_and_quantized_tensors_are_one_memory() -> None:
    plain = ROWS.clone()
    quantized = packing.as_quantized(plain[1:], 0.5, 100)
    assert torch.equal(quantized.dequantize(), (ROWS[1:].int() - 100) * 0.5)
    again = packing.as_bytes(quantized)
    assert again.data_ptr() == plain[1:].data_ptr()
    plain[1, 0] = 7
    assert again[0, 0] == 7
    assert float(quantized.dequantize()[0, 0]) == -46.5


def test_strides_are_those_of_the_bytes_and_a_negative_scale_turns_the_sign() -> None:
    found = packing.as_quantized(ROWS.t(), -1.0, 3)
    assert found.stride() == ROWS.t().stride()
    assert torch.equal(found.dequantize(), 3.0 - ROWS.t())
    signed = packing.as_quantized(WEIGHT, 2.0, -1)
    assert torch.equal(signed.dequantize(), (WEIGHT + 1) * 2.0)


def test_levels_end_at_the_highest() -> None:
    x = torch.tensor([-1.0, 0.0, 3.0, 1e6])
    assert packing.bytes_on_grid(x, 1.0, 5, 127).tolist() == [4, 5, 8, 127]
    assert packing.bytes_on_grid(x, 1.0, 5, 255).tolist() == [4, 5, 8, 255]


def test_the_largest_of_windows_is_that_of_floats() -> None:
    x = torch.randint(0, 256, (2, 3, 7, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    window = ([3, 2], [2, 1], [1, 1], [1, 2], True)
    expected = F.max_pool2d(x.float(), *window)
    assert torch.equal(packing.max_of_windows(x, *window).float(), expected)


# -- linear layers -----------------------------------------------------------------------------------------------------


def sums(x: Tensor, zero_point: int) -> Any:
    """Products of integers, in int64."""
    return (x.numpy().astype(np.int64) - zero_point) @ WEIGHT.numpy().astype(np.int64).T


@needs_fbgemm
@pytest.mark.parametrize("relu", [False, True])
def test_products_of_bytes_are_those_of_integers(relu: bool) -> None:
    packed = packing.packed_linear("fbgemm", WEIGHT, torch.full((5,), 0.01), torch.ones(5))
    rows = packing.quantized_rows(ROWS, None, 100)
    steps = np.rint(sums(ROWS, 100) * np.float32(0.01) + 1)
    expected = np.clip((steps.clip(min=0) if relu else steps) + 9, 0, 255)
    found = packing.linear_to_bytes(rows, packed, 9, relu).numpy()
    assert np.abs(found - expected).max() <= 1
    assert (found == expected).mean() > 0.9
    reals = sums(ROWS, 100) * 0.01 + 1
    floats = packing.linear_to_floats(ROWS, None, 100, packed, relu).numpy()
    np.testing.assert_allclose(floats, reals.clip(min=0) if relu else reals, rtol=1e-5, atol=1e-5)


@needs_fbgemm
def test_floats_are_quantized_on_the_way_to_the_product() -> None:
    packed = packing.packed_linear("fbgemm", WEIGHT, torch.full((5,), 0.01), None)
    x = (ROWS.float() - 100) * 0.5
    found = packing.linear_to_floats(x, 0.5, 100, packed, False).numpy()
    np.testing.assert_allclose(found, sums(ROWS, 100) * 0.5 * 0.01, rtol=1e-5, atol=1e-5)
    assert torch.equal(packing.quantized_rows(x, 0.5, 100).int_repr(), ROWS)


@needs_fbgemm
def test_many_rows_are_read_and_made_without_a_copy_and_are_the_same() -> None:
    packed = packing.packed_linear("fbgemm", WEIGHT, torch.full((5,), 0.01), None)
    many = ROWS.repeat(packing.COPIED_IN // ROWS.numel() + 1, 1)
    rows = packing.quantized_rows(many, None, 100)
    assert packing.as_bytes(rows).data_ptr() == many.data_ptr()
    found = packing.linear_to_bytes(rows, packed, 9, False)
    few = packing.linear_to_bytes(packing.quantized_rows(ROWS, None, 100), packed, 9, False)
    assert torch.equal(found[: len(ROWS)], few)
    assert torch.equal(found[-len(ROWS) :], few)


@needs_fbgemm
def test_packed_integers_can_be_had_back() -> None:
    scale = torch.rand(5) + 0.1
    assert torch.equal(packing.unpacked_linear(packing.packed_linear("fbgemm", WEIGHT, scale, None)), WEIGHT)
    for axes in (2, 3):
        weight = torch.randint(-128, 128, (4, 2, *[3] * axes), dtype=torch.int8)
        window = ([1] * axes, [0] * axes, [1] * axes, 1)
        packed = packing.packed_conv("fbgemm", weight, torch.rand(4) + 0.1, None, None, *window)
        assert torch.equal(packing.unpacked_conv(packed, axes), weight)


@needs_qnnpack
@pytest.mark.parametrize("op", ["linear", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"])
def test_qnnpack_gives_integers_back_each_time(op: str) -> None:
    axes = 0 if op == "linear" else int(op[-2])
    weight = torch.randint(-128, 128, (4, 4, *[3] * axes), dtype=torch.int8)
    transposed = [[0] * axes] if "transpose" in op else []
    window = ([1] * axes, [0] * axes, *transposed, [1] * axes, 1) if axes else ()
    packed = packing.packed_for_qnnpack(op, weight, torch.rand(4) + 0.1, torch.arange(4), None, *window)
    for _ in range(2):
        found = packing.unpacked_by_qnnpack(op, packed)
        assert found is not None
        assert torch.equal(found, weight)


def test_volumes_cannot_be_had_back_from_qnnpack() -> None:
    assert packing.unpacked_by_qnnpack("conv3d", object()) is None


# -- float16 weights ---------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
def test_float16_weights_are_multiplied_in_float32(bias: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, x = torch.randn(5, 8, generator=generator).half().float(), torch.randn(3, 8, generator=generator)
    expected = F.linear(x.double(), matrix.double(), None if bias is None else bias.double())
    one = packing.multiply_halves(x, packing.packed_halves(matrix), bias)
    several = packing.multiply_halves_on_threads(x, packing.packed_halves_for_threads(matrix, bias))
    for found in (one, several):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@needs_fbgemm
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_float16_cells_run_whole_sequences(kind: str) -> None:
    torch.manual_seed(0)
    layer = (nn.LSTM if kind == "lstm" else nn.GRU)(4, 3, batch_first=True)
    for parameter in layer.parameters():
        parameter.data = parameter.data.half().float()
    ih, hh, b_ih, b_hh = (parameter.detach() for parameter in layer.parameters())
    cell = packing.packed_half_cell((ih, b_ih), (hh, b_hh))
    x, state = torch.randn(2, 5, 4), [torch.randn(1, 2, 3) for _ in range(2 if kind == "lstm" else 1)]
    run = packing.lstm_dynamic if kind == "lstm" else packing.gru_dynamic
    found = run(x, state, [cell], 1, False, True)
    with torch.no_grad():
        sequence, last = layer(x, tuple(state) if kind == "lstm" else state[0])
    for one, other in zip(found, (sequence, *(last if kind == "lstm" else (last,))), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_build_without_fbgemm_has_no_float16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "fbgemm_pack_gemm_matrix_fp16", raising=False)
    assert not packing.has_halves()
