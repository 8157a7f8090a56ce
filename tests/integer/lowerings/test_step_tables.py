"""Step tables: an activation of an accumulator, exactly, for every accumulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.integer.lowerings.step_tables import LOWEST, first_accumulator, step_table, steps_of
from quantc.integer.match_lowering import NotIntegerError
from quantc.ir.curves import prelu
from tests.support.curves import EIGHT_BITS, ONE, SEEDS, curve, grid, is_rounding_of, lone_match
from tests.support.integer_matches import both, calibrated, floats_inside, integer_ops

SCALES = st.floats(1e-6, 0.3) | st.sampled_from([2.0**-10, 0.25, 0.5])


@settings(max_examples=120)
@given(
    st.sampled_from(list(ONE)), st.lists(SCALES, min_size=1, max_size=3), st.floats(1e-3, 0.1), EIGHT_BITS, st.data()
)
def test_steps_are_the_function_of_every_accumulator(
    name: str, scales: list[float], out_scale: float, dtype: torch.dtype, data: st.DataObject
) -> None:
    info = torch.iinfo(dtype)
    out = grid(out_scale, data.draw(st.integers(info.min, info.max)), dtype)
    scale = torch.tensor(scales, dtype=torch.float64)
    breakpoints, levels = step_table(curve(name), scale, out)
    accumulators = _telling(breakpoints, scale, data.draw(SEEDS))
    found = both("steps", accumulators, breakpoints.contiguous(), levels.to(dtype), 0)
    for row, step in enumerate(scales):
        for accumulator, level in zip(accumulators[row].tolist(), found[row].tolist(), strict=True):
            assert is_rounding_of(level, ONE[name][1](accumulator * step), out), (accumulator, step)


def _telling(breakpoints: Tensor, scale: Tensor, seed: int) -> Tensor:
    """Accumulators on both sides of breakpoints, at the ends of int32, and around zero."""
    generator = np.random.default_rng(seed)
    rows, count = breakpoints.shape
    picked = breakpoints.long()[:, generator.integers(0, count, 20)] if count else breakpoints.long()
    near = torch.round(torch.from_numpy(generator.uniform(-8, 8, (rows, 20))) / scale.reshape(-1, 1)).long()
    ends = torch.tensor([LOWEST + 1, -1, 0, 1, -LOWEST - 1]).expand(rows, -1)
    every = torch.cat([picked, picked + 1, near, ends], dim=1)
    return every.clamp(LOWEST + 1, -LOWEST - 1).to(torch.int32)


@settings(max_examples=30)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=4), SEEDS)
def test_steps_of_slopes_of_either_sign(slopes: list[float], seed: int) -> None:
    out, scale = grid(0.02, 100), torch.tensor([0.003], dtype=torch.float64)
    given = torch.tensor(slopes)
    breakpoints, levels = step_table(prelu(given), scale, out)
    accumulators = _telling(breakpoints, scale, seed)
    found = both("steps", accumulators, breakpoints.contiguous(), levels.to(torch.uint8), 0)
    for row, slope in enumerate(given.tolist()):
        for accumulator, level in zip(accumulators[row].tolist(), found[row].tolist(), strict=True):
            x = accumulator * 0.003
            assert is_rounding_of(level, x if x > 0 else slope * x, out)


@settings(max_examples=100)
@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=50, max_size=60), st.floats(1e-8, 10))
def test_the_first_accumulator_is_the_first(integers: list[int], scale: float) -> None:
    products = [integer * scale for integer in integers]
    numbers = [math.nextafter(x, x + side) for x in products for side in (-1, 0, 1)]
    found = first_accumulator(torch.tensor(numbers, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64))
    for number, first in zip(numbers, found.tolist(), strict=True):
        assert first * scale >= number > (first - 1) * scale


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_rows_of_steps_lie_along_an_axis(axis: int) -> None:
    x = torch.randint(-20, 20, (3, 3, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    breakpoints = torch.tensor([[-5, 0, 5], [-10, 2, 2**31 - 1], [-(2**31), 1, 2]], dtype=torch.int32)
    levels = torch.tensor([7, 3, 9, 1], dtype=torch.int8)
    found = both("steps", x, breakpoints, levels, axis)
    for index in range(3):
        row = x.select(axis, index)
        wanted = levels.numpy()[np.searchsorted(breakpoints[index].numpy(), row.numpy(), side="left")]
        assert np.array_equal(found.select(axis, index).numpy(), wanted)


def test_a_table_has_only_levels_that_occur() -> None:
    _, levels = step_table(curve("sigmoid"), torch.tensor([0.01]).double(), grid(1 / 256))
    assert levels.tolist() == list(range(256))
    breakpoints, levels = step_table(curve("gelu"), torch.tensor([5.0]).double(), grid(0.1, 10))
    # 5 lies far beyond what 8 bits hold in steps of 0.1: -5 and less is 0, then come 0, 5, 10, 15, 20 and the end
    assert (breakpoints.tolist(), levels.tolist()) == ([[0, 1, 2, 3, 4]], [10, 60, 110, 160, 210, 255])


def _linear_with(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), activation, nn.Linear(6, 4)).eval()


@pytest.mark.parametrize(
    "activation", [nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Tanh(), nn.ELU(), nn.LeakyReLU(-0.2), nn.PReLU(6, 0.3)]
)
def test_an_activation_after_a_product_takes_one_table(activation: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8) * 2
    prepared = calibrated(qc.capture(_linear_with(activation), (x,)), "x86", [x])
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    assert [str(node.target) for node in integer_ops(lowered)][1] == "quantc.steps.default"
    assert not floats_inside(lowered)
    assert torch.equal(lowered(x), qc.convert(prepared, to="integer", style="decomposed")(x))
    wanted = converted(x).detach()
    assert float((lowered(x) - wanted).square().mean().sqrt() / wanted.std()) < 0.01


def test_a_result_of_16_bits_has_no_table_of_steps() -> None:
    task, quantizer = lone_match("gelu", F.gelu, "qnnpack")
    steps_of(task, torch.tensor(0.1), task.core, quantizer)
    quantizer.args = (*quantizer.args[:3], -(2**15), 2**15 - 1, torch.int16)
    with pytest.raises(NotIntegerError, match="more than 8 bits"):
        steps_of(task, torch.tensor(0.1), task.core, quantizer)


def test_slopes_and_scales_must_lie_along_one_axis() -> None:
    task, quantizer = lone_match("prelu", lambda x: F.prelu(x, torch.full((8,), 0.5)), "qnnpack")
    assert steps_of(task, torch.full((8,), 0.1), task.core, quantizer).axis == -1
    with pytest.raises(NotIntegerError, match="different axes"):
        steps_of(task, torch.full((4, 1), 0.1), task.core, quantizer)
