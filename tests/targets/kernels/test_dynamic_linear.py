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

from quantc.errors import InputError
from quantc.integer.library import OPS
from quantc.qdq.choose_qparams import choose_qparams
from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels.dynamic_linear import LinearDynamic, OfRows, OfWhole, OfWholeOnQnnpack, Weight
from quantc.targets.kernels.dynamic_quantization import RunTimeGrid, float32
from quantc.targets.kernels.saturation import adds_in_16_bits, can_saturate

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
        found: Tensor = TARGET(x, of.levels, None, of.scale, of.bias, *self.arguments)
        return found

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
        if self.per_token:  # the zero point is added before rounding there too: only the end of the grid may differ
            near = near * (steps == steps.amax(-1, keepdim=True)) if self.zero_point is None else near * 0
        flips = near @ weights * step
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
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    excess = (found.double() - expected.double()).abs() - case.allowed(given_, of)
    assert excess.max() <= 0


@settings(max_examples=60)
@given(
    case=st.sampled_from(sorted(CASES)),
    rows=st.integers(1, 20),
    columns=st.integers(1, 70),
    outputs=st.integers(1, 40),
    size=st.floats(-7, 7),
    shift=st.floats(-4, 4),
    seed=st.integers(0, 2**16),
    whole=st.booleans(),
)
def test_holds_for_any_shape_and_range(
    case: str, rows: int, columns: int, outputs: int, size: float, shift: float, seed: int, whole: bool
) -> None:
    of, own = weight(outputs, columns, seed, whole=whole), CASES[case]
    x = (torch.randn(rows, columns, generator=seeded(seed)) + shift) * 10**size
    excess = (own.build(of)(x).double() - own.integer(x, of).double()).abs() - own.allowed(x, of)
    assert excess.max() <= 0


@pytest.mark.parametrize("name", ["whole", "rows"])
def test_equals_float64_sums_of_torchs_levels(name: str) -> None:
    """The same numbers by way of torch's ops alone: its choice of scales, its levels, a product in float64."""
    case, of, x = CASES[name], weight(24, 40), INPUTS["normal"]
    ops = decomposed_ops()
    expected = []
    for part in x.unbind() if case.per_token else [x]:
        scale, zero = ops.choose_qparams.tensor(part, 0, 127, EPS, torch.uint8)
        levels = ops.quantize_per_tensor.tensor(part, scale, zero, 0, 127, torch.uint8)
        real = (levels.double() - zero.double()) * scale.double()
        expected.append(real @ (of.levels.double().t() * of.scale.double()) + of.bias)
    whole = torch.stack(expected) if case.per_token else expected[0]
    torch.testing.assert_close(case.build(of)(x).double(), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_what_is_not_finite_stays_so(case: Case, value: float, place: int) -> None:
    of, x = weight(24, 40), INPUTS["normal"].clone()
    x[3, place] = value
    found, expected = case.build(of)(x), case.integer(x, of)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not found[3].isfinite().any()
    assert found[4].isfinite().all() == case.per_token


def test_a_range_that_float32_cannot_measure_is_not_finite() -> None:
    x = torch.tensor([[3e38, -3e38, 1.0]])
    for case in CASES.values():
        assert case.build(weight(4, 3))(x).isfinite().any() == (case.zero_point is not None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40), (2, 0, 40)], ids=str)
def test_takes_tensors_of_any_rank_and_none(case: Case, shape: tuple[int, ...]) -> None:
    of, x = weight(24, 40), torch.randn(shape, generator=seeded(2))
    found, expected = case.build(of)(x), case.integer(x, of)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=float(case.allowed(x, of).max()) if x.numel() else 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_takes_other_strides_and_dtypes(case: Case) -> None:
    of, x = weight(24, 40), torch.randn(40, 9, generator=seeded(3)).t()
    kernel = case.build(of)
    assert torch.equal(kernel(x), kernel(x.contiguous()))
    assert torch.equal(kernel(x[::2, :]), kernel(x[::2, :].contiguous()))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(kernel(x.to(dtype)), kernel(x.to(dtype).float()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shape", [(3, 39), (3, 41), ()], ids=str)
def test_other_columns_are_refused(case: Case, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="its weight has 40 columns"):
        case.build(weight(24, 40))(torch.zeros(shape))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_does_a_relu_too(case: Case) -> None:
    of = weight(24, 40)
    plain, own = case.build(of), case.build(of)
    assert own.absorb("relu")
    assert not own.absorb("gelu")
    for x in (INPUTS["normal"], INPUTS["normal"][:1]):
        assert torch.equal(own(x), plain(x).relu())
    assert "relu" in repr(own)
    assert "relu" not in repr(plain)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("biases", list(itertools.product([True, False], repeat=2)), ids=str)
@pytest.mark.parametrize("in_order", [True, False])
def test_layers_in_one_give_what_each_gives(case: Case, biases: tuple[bool, ...], in_order: bool) -> None:
    layers = [case.build(weight(8 + index, 40, index, bias, whole=index == 1)) for index, bias in enumerate(biases)]
    for layer in layers:
        layer.in_order = in_order
    together = type(layers[0]).joined(layers)
    for x in (INPUTS["normal"], INPUTS["normal"][:1], INPUTS["normal"][0], INPUTS["normal"][:0]):
        found = together(x)
        assert [part.shape for part in found] == [layer(x).shape for layer in layers]
        assert all(part.is_contiguous() for part in found) or not in_order
        for part, layer in zip(found, layers, strict=True):
            torch.testing.assert_close(part, layer(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("span", "saturates"), [(127, False), (255, True)])
def test_kernels_say_what_they_add_in_16_bits(span: int, saturates: bool) -> None:
    of = Weight(torch.full((2, 40), 127, dtype=torch.int8), torch.ones(2), None)
    kernel = OfWhole(of, RunTimeGrid(span, None, EPS))
    assert can_saturate(kernel) is saturates
    assert not can_saturate(OfWholeOnQnnpack(of, RunTimeGrid(255, None, EPS)))
    if adds_in_16_bits():
        x = torch.ones(3, 40)
        assert (kernel(x) == 127 * 40).all() != saturates


def test_the_kernel_alone_would_hide_nan() -> None:
    """Why the range is looked at first: the kernel makes a level of NaN like of any number."""
    of, x = weight(24, 40, bias=False), INPUTS["normal"].clone()
    x[0, 1] = torch.nan
    packed = OfWhole(of, CASES["whole"].grid).pack()
    found = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 0.05, 60, packed)
    assert found[0].isfinite().all()
