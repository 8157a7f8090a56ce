"""Linear layers on bytes: each family against NumPy and against the integer form, few and many rows, activations."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError
from quantc.targets.kernels.dynamic_linear import Weight
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_linear import FEW_ROWS, OnOnednn, Reading
from tests.support.linear_families import CLOSE, FAMILIES, gaps, layers, lowered, only

families = pytest.mark.parametrize("family", list(FAMILIES))


# -- the kernels themselves, against NumPy -----------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    family=st.sampled_from(list(FAMILIES)),
    rows=st.integers(1, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40),
    zero_points=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    bounds=st.sampled_from([(0, 255), (0, 100), (17, 200)]),
    bias=st.booleans(),
    floats_in=st.booleans(),
    floats_out=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products_are_those_of_integers(
    family: str,
    rows: int,
    inputs: int,
    outputs: int,
    zero_points: tuple[int, int],
    bounds: tuple[int, int],
    bias: bool,
    floats_in: bool,
    floats_out: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x_zero, zero = zero_points
    weight = rng.integers(-64, 65, (outputs, inputs)).astype(np.int8)
    multiplier = rng.uniform(0.2, 2.0, outputs).astype(np.float32) / (20 * np.sqrt(inputs).astype(np.float32))
    shift = rng.normal(0, 10, outputs).astype(np.float32) if bias else None
    levels = rng.integers(0, 256, (rows, inputs)).astype(np.uint8)
    scale = 0.037
    x = levels if not floats_in else ((levels.astype(np.float64) - x_zero) * scale).astype(np.float32)

    sums = (levels.astype(np.int64) - x_zero) @ weight.astype(np.int64).T
    reals = sums * multiplier.astype(np.float64) + (0 if shift is None else shift)
    dtype = torch.float32 if floats_out else torch.uint8
    ending = Ending(torch.from_numpy(multiplier), 0 if floats_out else zero, *bounds, dtype)
    plain = Weight(torch.from_numpy(weight), ending.multiplier, None if shift is None else torch.from_numpy(shift))
    kernel = FAMILIES[family](plain, Reading(x_zero, 255, scale if floats_in else None), ending)
    found = kernel(torch.from_numpy(x)).numpy()

    if floats_out:
        assert np.abs(found - reals).max() <= CLOSE * np.abs(reals).max() + 1e-30
    else:
        expected = np.clip(np.rint(reals) + zero, *bounds)
        assert np.abs(found.astype(np.int64) - expected).max() <= 1
        assert (found != expected).mean() < 0.02
    packed = kernel._packed
    assert np.array_equal(kernel.unpack(packed)["weight"].numpy(), weight)


@families
def test_rows_of_any_number_and_shape(family: str) -> None:
    torch.manual_seed(0)
    levels = torch.randint(-64, 65, (24, 32), dtype=torch.int8)
    ending = Ending(torch.full((24,), 0.004), 7, 0, 255, torch.uint8)
    kernel = FAMILIES[family](Weight(levels, ending.multiplier, torch.randn(24)), Reading(3, 255), ending)
    whole = torch.randint(0, 256, (6 * FEW_ROWS, 32), dtype=torch.uint8)
    expected = kernel(whole)
    for count in (0, 1, 2, FEW_ROWS, FEW_ROWS + 1, 2 * FEW_ROWS):
        found = kernel(whole[:count])
        assert found.shape == (count, 24)
        assert found.dtype is torch.uint8
        assert int((found.int() - expected[:count].int()).abs().max() if count else 0) <= 1
    assert torch.equal(kernel(whole[0]), kernel(whole[:1])[0])
    assert kernel(whole.reshape(2, 3, -1, 32)).shape == (2, 3, FEW_ROWS, 24)
    assert kernel(whole[:0].reshape(2, 0, 32)).shape == (2, 0, 24)
    turned = whole.t().contiguous().t()
    assert torch.equal(kernel(turned), expected)
    assert torch.equal(kernel(torch.stack([whole, whole], dim=1)[:, 0]), expected)
    with pytest.raises(InputError, match="32 columns"):
        kernel(whole[:, :31])


def test_few_rows_on_many_threads_at_once() -> None:
    torch.manual_seed(0)
    ending = Ending(torch.full((16,), 0.01), 0, 0, 255, torch.uint8)
    levels = torch.randint(-64, 65, (16, 32), dtype=torch.int8)
    kernel = OnOnednn(Weight(levels, ending.multiplier, None), Reading(3, 255), ending)
    x = torch.randint(0, 256, (1, 32), dtype=torch.uint8)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(kernel(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(one, found[0]) for one in found)


# -- in programs -------------------------------------------------------------------------------------------------------


@settings(max_examples=16)
@given(
    family=st.sampled_from(list(FAMILIES)),
    rows=st.integers(1, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40),
    bias=st.booleans(),
    after=st.sampled_from([nn.Identity, nn.ReLU, nn.ReLU6, nn.GELU, nn.Tanh, nn.SiLU, nn.Hardswish, nn.Sigmoid]),
    leading=st.booleans(),
)
def test_linears(family: str, rows: int, inputs: int, outputs: int, bias: bool, after: Any, leading: bool) -> None:
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias), after(), nn.Linear(outputs, 3))
    x = torch.randn(2, rows, inputs) if leading else torch.randn(rows, inputs)
    module = lowered(family, model, x)
    gaps(module, x)
    assert [kernel.family for kernel in layers(module)] == [family, family]


@families
@pytest.mark.parametrize("captured", [1, 40])
def test_other_numbers_of_rows_than_it_was_captured_with(family: str, captured: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))
    batch = torch.export.Dim("batch", min=1, max=128)
    module = lowered(family, model, torch.randn(max(captured, 2), 24), dynamic_shapes=({0: batch},))
    for rows in (captured, 1, 3, FEW_ROWS, FEW_ROWS + 1, 100):
        gaps(module, torch.randn(rows, 24))


@families
def test_weights_are_held_once_and_come_back(family: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8))
    module = lowered(family, model, x)
    before = {name: tensor.clone() for name, tensor in module.program.module.state_dict().items()}
    result = module(x)
    assert all(kernel.optional_buffer("weight") is None for kernel in layers(module))
    held = sum(t.numel() * t.element_size() for k in layers(module) for t in k.buffers(recurse=False))
    assert held < 0.05 * 4 * sum(weight.numel() for weight in model.parameters())
    after = module.program.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    few = module(x)[:1]
    assert float((copy.deepcopy(module)(x)[:1] - few).abs().max()) == 0.0
    assert torch.equal(module(x), result)


class Apart(nn.Module):
    """Three products of one tensor."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        parts = [layer(x).reshape(2, -1, 4, 8).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape))


@families
def test_layers_that_read_the_same_are_one(family: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 24, 32)
    model = Apart()
    prepared = qc.prepare(qc.capture(model.eval(), (x,)), "x86", config=qc.QuantConfig().set_op("matmul", qc.FLOAT))
    qc.calibrate(prepared, [(x,)])
    with only(family):
        module = qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")
    gaps(module, x)
    assert [kernel.outputs for kernel in layers(module)] == [[32, 32, 32], []]
    module(x)
    assert all(kernel.optional_buffer("weight") is None for kernel in layers(module))
    expected = module.program(x)
    assert float((module(x) - expected).abs().max()) <= 0.02 * float(expected.abs().max())


@families
def test_relu_of_float_results_is_done_by_the_kernel(family: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 16)
    module = lowered(family, nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Softmax(-1)), x)
    gaps(module, x)
    assert float((module(x) - module.program(x)).abs().max()) < 1e-5
