"""Integer products: kernel, reference and an oracle in NumPy's int64 and float64 agree bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.integer.library import OPS
from quantc.integer.ops.products import linear as linear_reference
from quantc.integer.semantics import load
from tests.support.integer_oracle_sums import convolve, convolve_transposed

load()

Ints = npt.NDArray[np.int64]
ACCUMULATOR = (None, None, 0, 0, 0, torch.int32)
several = settings(max_examples=60)
TYPES = (torch.uint8, torch.int8, torch.int16)


# -- the oracle ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """The last arguments of a product, and what they make of an accumulator."""

    args: tuple[Any, ...]

    def of(self, acc: Ints) -> npt.NDArray[Any]:
        multiplier, shift, zero_point, qmin, qmax, dtype = self.args
        if multiplier is None:
            return acc.astype(np.int32)
        if dtype is torch.float32:
            return np.asarray(acc.astype(np.float64) * multiplier.numpy(), np.float32)
        if shift is None:
            levels = np.rint(acc.astype(np.float64) * multiplier.numpy())
        else:
            mantissas = np.broadcast_to(multiplier.numpy(), acc.shape).ravel()
            places = np.broadcast_to(shift.numpy(), acc.shape).ravel()
            exact = [
                Fraction(int(a) * int(m), 2 ** int(p)) for a, m, p in zip(acc.ravel(), mantissas, places, strict=True)
            ]
            levels = np.array([round(value) for value in exact], dtype=np.int64).reshape(acc.shape)
        return np.asarray(np.clip(levels + zero_point, qmin, qmax), str(dtype).removeprefix("torch."))


def bits(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """So that 0.0 and -0.0 differ."""
    return value.view(np.int32) if value.dtype == np.float32 else value


def check(op: str, args: tuple[Any, ...], acc: Ints, bias: Tensor | None, trailing: int, ending: Ending) -> None:
    """The op by its kernel, and by its reference, against an accumulator without the bias."""
    if bias is not None:
        acc = acc + bias.numpy().astype(np.int64).reshape(-1, *[1] * trailing)
    expected = ending.of(acc)
    for run in (OPS[op].target, OPS[op].reference):
        found = run(*args, *ending.args)
        assert found.is_contiguous()
        assert found.numpy().dtype == expected.dtype
        np.testing.assert_array_equal(bits(found.numpy()), bits(expected))


# -- what it is given ----------------------------------------------------------------------------------------------


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Over the whole range of a type, its ends often."""
    ends = torch.iinfo(dtype)
    values = rng.integers(ends.min, ends.max + 1, shape)
    values = np.where(rng.random(shape) < 0.2, rng.choice([ends.min, ends.max], shape), values)
    return torch.from_numpy(np.asarray(values)).to(dtype)


def wide(x: Tensor) -> Ints:
    return x.numpy().astype(np.int64)


@st.composite
def endings(draw: st.DrawFn, channels: int, trailing: int) -> Ending:
    kind = draw(st.sampled_from(["accumulator", "float64", "float64", "fixed", "float"]))
    if kind == "accumulator":
        return Ending(ACCUMULATOR)
    shape = draw(st.sampled_from([(), (channels, *[1] * trailing)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    multiplier = torch.from_numpy(np.asarray(2.0 ** rng.uniform(-16, -2, shape)))
    if draw(st.booleans()):
        multiplier = 2.0 ** multiplier.log2().round()  # so that there are ties
    if kind == "float":
        return Ending((multiplier, None, 0, 0, 0, torch.float32))
    dtype = draw(st.sampled_from(TYPES))
    ends = torch.iinfo(dtype)
    low, high = sorted(draw(st.tuples(*[st.integers(ends.min, ends.max)] * 2)))
    grid = (draw(st.integers(ends.min, ends.max)), low, high, dtype)
    if kind == "float64":
        return Ending((multiplier, None, *grid))
    mantissa = torch.from_numpy(np.asarray(rng.integers(2**30, 2**31, shape))).to(torch.int32)
    shift = torch.from_numpy(np.asarray(rng.integers(33, 48, shape))).to(torch.int32)
    return Ending((mantissa, shift, *grid))


@dataclass(frozen=True, eq=False)
class Factors:
    """Two factors with their zero points, a bias, and into how many parts the sum goes."""

    x: Tensor
    x_zero_point: int
    w: Tensor
    w_zero_point: Tensor | None
    bias: Tensor | None
    parts: int

    @property
    def head(self) -> tuple[Any, ...]:
        return (self.x, self.x_zero_point, self.w, self.w_zero_point, self.bias)

    def centered(self, axis: int) -> tuple[Ints, Ints]:
        if self.w_zero_point is None:
            return wide(self.x) - self.x_zero_point, wide(self.w)
        shape = [-1 if dim == axis else 1 for dim in range(self.w.dim())] if self.w_zero_point.dim() else []
        return wide(self.x) - self.x_zero_point, wide(self.w) - wide(self.w_zero_point).reshape(shape)


@st.composite
def factors(
    draw: st.DrawFn, x_shape: tuple[int, ...], w_shape: tuple[int, ...], scales: int, outputs: int, inputs: int
) -> Factors:
    """`scales` is the number of weight scales there can be, `inputs` how many channels a sum can be split along."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    x_type = draw(st.sampled_from(TYPES))
    w_type = draw(st.sampled_from([torch.int8, torch.int8, torch.uint8]))
    ends, w_ends = torch.iinfo(x_type), torch.iinfo(w_type)
    zero_point = draw(st.one_of(st.just(0), st.integers(ends.min, ends.max)))
    w_zero_point = None
    if draw(st.booleans()):
        size = draw(st.sampled_from([(), (scales,)]))
        w_zero_point = torch.from_numpy(np.asarray(rng.integers(w_ends.min, w_ends.max + 1, size)))
    bias = None
    if draw(st.booleans()):
        bias = torch.from_numpy(rng.integers(-(2**20), 2**20, outputs)).to(torch.int32)
    parts = 0 if x_type is torch.int16 else draw(st.integers(0, inputs))
    return Factors(
        integers(rng, x_shape, x_type), zero_point, integers(rng, w_shape, w_type), w_zero_point, bias, parts
    )


# -- matrices ------------------------------------------------------------------------------------------------------


@several
@given(st.data(), st.sampled_from([(), (0,), (1,), (3,), (2, 3), (0, 3)]), st.integers(1, 40), st.integers(1, 9))
def test_linear(data: st.DataObject, lead: tuple[int, ...], inputs: int, outputs: int) -> None:
    case = data.draw(factors((*lead, inputs), (outputs, inputs), outputs, outputs, inputs))
    x, w = case.centered(axis=0)
    ending = data.draw(endings(outputs, 0))
    check("linear", (*case.head, case.parts), x @ w.T, case.bias, 0, ending)


SHAPES = [
    ((5, 7), (7, 3)),
    ((7,), (7, 3)),
    ((5, 7), (7,)),
    ((7,), (7,)),
    ((2, 3, 5, 7), (7, 4)),
    ((5, 7), (2, 3, 7, 4)),
    ((2, 1, 5, 7), (3, 7, 4)),
    ((7,), (3, 7, 4)),
    ((3, 5, 7), (7,)),
    ((0, 5, 7), (0, 7, 4)),
    ((2, 0, 7), (2, 7, 4)),
]


@several
@given(st.data(), st.sampled_from(SHAPES))
def test_matmul(data: st.DataObject, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    outputs = shapes[1][-1] if len(shapes[1]) > 1 else 1
    case = data.draw(factors(*shapes, outputs, outputs, 7))
    if len(shapes[1]) == 1 and case.w_zero_point is not None:
        case = Factors(case.x, case.x_zero_point, case.w, case.w_zero_point.reshape(()), None, case.parts)
    bias = case.bias if len(shapes[1]) > 1 else None
    x, y = case.centered(axis=len(shapes[1]) - 1)
    ending = data.draw(endings(outputs, 0)) if len(shapes[1]) > 1 else Ending(ACCUMULATOR)
    head = (*case.head[:4], bias, case.parts)
    check("matmul", head, np.asarray(np.matmul(x, y)), bias, 0, ending)


# -- convolutions --------------------------------------------------------------------------------------------------


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    rank = draw(st.sampled_from([1, 2, 2, 3]))
    each = st.tuples

    def numbers(low: int, high: int) -> list[int]:
        return list(draw(each(*[st.integers(low, high)] * rank)))

    kernel, dilation, stride = numbers(1, 3), numbers(1, 2), numbers(1, 3)
    padding = numbers(0, 2)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = [max(1, r - 2 * p) + more for r, p, more in zip(reach, padding, numbers(0, 4), strict=True)]
    sizes = {"groups": draw(st.sampled_from([1, 1, 2, 3])), "inputs": draw(st.integers(1, 5))}
    found = {"kernel": kernel, "dilation": dilation, "stride": stride, "padding": padding, "size": size}
    return {**found, **sizes, "outputs": draw(st.integers(1, 3)), "lead": draw(st.sampled_from([(), (1,), (2,), (0,)]))}


def in_a_batch(x: Ints, lead: tuple[int, ...]) -> Ints:
    return x if lead else x[None]


@several
@given(st.data(), windows())
def test_conv(data: st.DataObject, of: dict[str, Any]) -> None:
    rank, outputs = len(of["kernel"]), of["outputs"] * of["groups"]
    x_shape = (*of["lead"], of["inputs"] * of["groups"], *of["size"])
    case = data.draw(factors(x_shape, (outputs, of["inputs"], *of["kernel"]), outputs, outputs, of["inputs"]))
    x, w = case.centered(axis=0)
    window = (of["stride"], of["padding"], of["dilation"], of["groups"])
    acc = convolve(in_a_batch(x, of["lead"]), w, *window)
    acc = acc if of["lead"] else acc[0]
    ending = data.draw(endings(outputs, rank))
    check("conv", (*case.head, *window, case.parts), acc, case.bias, rank, ending)


@several
@given(st.data(), windows())
def test_conv_transpose(data: st.DataObject, of: dict[str, Any]) -> None:
    rank, outputs = len(of["kernel"]), of["outputs"] * of["groups"]
    more = [data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(of["stride"], of["dilation"], strict=True)]
    padding = []
    for axis in range(rank):
        whole = (of["size"][axis] - 1) * of["stride"][axis] + of["dilation"][axis] * (of["kernel"][axis] - 1) + 1
        padding.append(min(of["padding"][axis], (whole + more[axis] - 1) // 2))
    x_shape = (*of["lead"], of["inputs"] * of["groups"], *of["size"])
    w_shape = (of["inputs"] * of["groups"], of["outputs"], *of["kernel"])
    case = data.draw(factors(x_shape, w_shape, of["outputs"], outputs, of["inputs"]))
    x, w = case.centered(axis=1)
    batch = in_a_batch(x, of["lead"])
    acc = convolve_transposed(batch, w, of["stride"], padding, more, of["dilation"], of["groups"])
    acc = acc if of["lead"] else acc[0]
    window = (of["stride"], padding, more, of["groups"], of["dilation"])
    ending = data.draw(endings(outputs, rank))
    check("conv_transpose", (*case.head, *window, case.parts), acc, case.bias, rank, ending)


# -- the rest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_a_bias_without_axes_is_added_everywhere(kind: str) -> None:
    x, w = torch.ones(2, 4, dtype=torch.uint8), torch.ones(3, 4, dtype=torch.int8)
    bias = torch.tensor([5] if kind == "tensor" else 5, dtype=torch.int32)
    for run in (OPS["linear"].target, linear_reference):
        assert run(x, 0, w, None, bias, 1, *ACCUMULATOR).tolist() == [[9] * 3] * 2
