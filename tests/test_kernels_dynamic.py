"""Kernels of linear layers that quantize as they run, against the op of the integer form and torch's own ops.

What a kernel may differ in is stated as a bound for every element: levels of numbers that lie halfway between two (one
step of the activation each), half a step of the accumulator for the bias, and float32's rounding of the sums.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.decomposed import decomposed_ops
from quantc.errors import InputError
from quantc.integer.library import OPS
from quantc.kernels.linear_dynamic import LinearDynamic, OfRows, OfWhole, OfWholeOnQnnpack, Weight
from quantc.kernels.run_time_grid import RunTimeGrid, float32
from quantc.run_time import choose_qparams

EPS = 2.0**-14
TARGET = OPS["linear_dynamic"].target
FLOAT32 = 2.0**-22
"""A few roundings of float32, relative to what is rounded."""
TIE = 2.0**-14
"""How near to halfway between two levels a number is that may go to either, in steps."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(rows: int, columns: int, seed: int = 0, bias: bool = True, whole: bool = False) -> Weight:
    generator = seeded(seed)
    levels = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, generator=generator) * 0.01 + 1e-4
    made = torch.randn(rows, generator=generator) if bias else None
    return Weight(levels, scale[0] if whole else scale, made)


@dataclass(frozen=True)
class Case:
    """A kernel class, with the arguments that the op of the integer form has in its place."""

    kernel: type[LinearDynamic]
    qmin: int
    qmax: int
    zero_point: int | None = None
    dtype: torch.dtype = torch.uint8
    eps: float = EPS

    @property
    def per_token(self) -> bool:
        return self.kernel is OfRows

    @property
    def grid(self) -> RunTimeGrid:
        middle = None if self.zero_point is None else self.zero_point - self.qmin
        return RunTimeGrid(self.qmax - self.qmin, middle, float32(self.eps))

    def build(self, of: Weight) -> LinearDynamic:
        return self.kernel(of, self.grid)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.per_token, self.zero_point, self.qmin, self.qmax, self.dtype, self.eps

    def integer(self, x: Tensor, of: Weight) -> Tensor:
        return TARGET(x, of.levels, None, of.scale, of.bias, *self.arguments)

    def allowed(self, x: Tensor, of: Weight) -> Tensor:
        """By how much each result may differ from that of the integer form."""
        wide = x.double()
        scale, offset = choose_qparams(x, self.per_token, self.zero_point, self.qmin, self.qmax, self.eps)
        step = scale.double()
        steps = wide / step
        near = (((steps - 0.5) - (steps - 0.5).round()).abs() < TIE + steps.abs() * FLOAT32).double()
        if self.kernel is OfWholeOnQnnpack and scale.item() == self.eps:
            near = torch.ones_like(wide)  # its own smallest scale is 6.1e-5, a little less than 2^-14
        weights = of.levels.double().abs().t() * of.scale.double()
        flips = torch.zeros(1).double() if self.per_token else near @ weights * step
        # the sums are rounded as they are before the zero point is taken off
        size = ((steps.abs() + (offset - self.qmin).abs()) @ weights) * step
        bias = torch.zeros(1).double() if of.bias is None else of.bias.double().abs()
        return flips + 0.5 * step * of.scale.double() + FLOAT32 * (size + bias)


CASES = {
    "whole": Case(OfWhole, 0, 127),
    "whole int8": Case(OfWhole, -64, 63, None, torch.int8),
    "whole symmetric": Case(OfWhole, 0, 127, 64),
    "whole eps": Case(OfWhole, 0, 127, eps=1e-9),
    "rows": Case(OfRows, 0, 127),
    "rows int8": Case(OfRows, -64, 63, None, torch.int8),
    "rows symmetric": Case(OfRows, 0, 127, 64),
    "rows eps": Case(OfRows, 0, 127, eps=1e-9),
    "qnnpack": Case(OfWholeOnQnnpack, 0, 255),
    "qnnpack eps": Case(OfWholeOnQnnpack, 0, 255, eps=2.0**-12),
}

x = torch.randn(9, 40, generator=seeded(1))
INPUTS = {
    "normal": x,
    "positive": x.abs() + 1,
    "negative": -x.abs() - 3,
    "zero": x * 0,
    "one value": x * 0 + 0.37,
    "one negative value": x * 0 - 0.37,
    "tiny": x * 1e-6,
    "small": x * 1e-3,
    "large": x * 1e20,
    "an outlier": torch.cat([x[:, 1:], x[:, :1] * 0 + 300], dim=1),
    "halfway": torch.arange(360.0).reshape(9, 40) / 2 - 31.5,
    "rows of all sizes": x * torch.logspace(-9, 9, 9).unsqueeze(1),
    "subnormal": x * 1e-40,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("given_", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_differs_from_the_integer_form_by_no_more_than_ties_and_bias(case: Case, given_: Tensor, bias: bool) -> None:
    of = weight(24, 40, bias=bias)
    found, expected = case.build(of)(given_), case.integer(given_, of)
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
    excess = (found.double() - expected.double()).abs() - case.allowed(given_, of)
    assert excess.max() <= 0
