"""Moves on integers: bit for bit what the same op makes of the integers as float64 numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.executorch import EXECUTORCH
from quantc.backends.qnnpack import QNNPACK
from quantc.backends.x86 import X86
from quantc.ir.program import Program
from quantc.spec.spec import INT8, INT16, UINT8, QuantSpec
from tests.support.moves import (
    NARROW,
    SCALE,
    SPECS,
    Function,
    backend,
    captured,
    computes_on_integers,
    fixed,
    images,
    integer_form,
    levels,
    moved,
    real,
    results,
)


def rows() -> Tensor:
    return images().reshape(2, 4, 48)


def volumes() -> Tensor:
    return images().reshape(2, 4, 4, 4, 3)


INDEX = torch.tensor([2, 0, 3, 3])
PICKED = torch.tensor([[[[1, 0, 2, 5, 5, 0, 1, 1]]]]).expand(2, 4, 1, 8)
CASES: dict[str, tuple[Function, Callable[[], Tensor]]] = {
    "reshape": (lambda x: x.reshape(2, 8, 24), images),
    "flatten": (lambda x: x.flatten(1), images),
    "unflatten": (lambda x: x.unflatten(2, (2, 3)), images),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1), images),
    "squeeze-all": (lambda x: torch.ops.aten.squeeze.default(x.unsqueeze(1)), images),
    "squeeze-dims": (lambda x: torch.ops.aten.squeeze.dims(x.unsqueeze(1).unsqueeze(1), [1, 2]), images),
    "transpose": (lambda x: x.transpose(1, 3), images),
    "permute": (lambda x: x.permute(3, 0, 2, 1), images),
    "expand": (lambda x: x.unsqueeze(0).expand(3, 2, 4, 6, 8), images),
    "repeat": (lambda x: x.repeat(1, 2, 1, 3), images),
    "repeat-interleave": (lambda x: x.repeat_interleave(3, 1), images),
    "slice": (lambda x: x[:, 1:3, ::2, -3:], images),
    "select": (lambda x: x.select(2, -1), images),
    "narrow": (lambda x: x.narrow(3, 2, 4), images),
    "index": (lambda x: x[:, INDEX], images),
    "index-several": (lambda x: x[:, INDEX, :, torch.tensor([7, 0, 1, 2])], images),
    "index-select": (lambda x: x.index_select(1, INDEX), images),
    "gather": (lambda x: x.gather(2, PICKED), images),
    "flip": (lambda x: x.flip(1, 3), images),
    "roll": (lambda x: x.roll((1, -2), (1, 3)), images),
    "pixel-shuffle": (lambda x: F.pixel_shuffle(x, 2), images),
    "pixel-unshuffle": (lambda x: F.pixel_unshuffle(x, 2), images),
    "channel-shuffle": (lambda x: F.channel_shuffle(x, 2), images),
    "clone": (lambda x: x.clone(), images),
    "split": (lambda x: x.split(3, 3), images),
    "split-sizes": (lambda x: x.split([1, 5], 2), images),
    "chunk": (lambda x: x.chunk(3, 3), images),
    "unbind": (lambda x: x.unbind(1), images),
    "one-of-split": (lambda x: x.split(3, 3)[2], images),
    "amax": (lambda x: x.amax((2, 3)), images),
    "amin": (lambda x: x.amin(1, keepdim=True), images),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3)), images),
    "pad-less": (lambda x: F.pad(x, (-1, 2, -2, 0)), images),
    "pad-reflect": (lambda x: F.pad(x, (1, 2, 0, 3), mode="reflect"), images),
    "pad-replicate": (lambda x: F.pad(x, (1, 2, 4, 3), mode="replicate"), images),
    "pad-circular": (lambda x: F.pad(x, (1, 2, 0, 3), mode="circular"), images),
    "max-pool1d": (lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True), rows),
    "max-pool1d-plain": (lambda x: F.max_pool1d(x, 4), rows),
    "max-pool1d-dilated": (lambda x: F.max_pool1d(x, 3, 2, dilation=4), rows),
    "max-pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), images),
    "max-pool2d-ceil": (lambda x: F.max_pool2d(x, (2, 3), 2, (1, 1), ceil_mode=True), images),
    "max-pool2d-dilated": (lambda x: F.max_pool2d(x, 2, 2, dilation=(2, 3)), images),
    "max-pool3d": (lambda x: F.max_pool3d(x, 3, 2, 1), volumes),
    "max-pool-indices": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[0], images),
    "adaptive-max-pool1d": (lambda x: F.adaptive_max_pool1d(x, 7), rows),
    "adaptive-max-pool2d": (lambda x: F.adaptive_max_pool2d(x, (4, 3)), images),
    "adaptive-max-pool3d": (lambda x: F.adaptive_max_pool3d(x, (3, 1, 2)), volumes),
    "relu": (lambda x: x.relu(), images),
}
UPSAMPLED: dict[str, tuple[Function, Callable[[], Tensor]]] = {
    "upsample1d": (lambda x: F.interpolate(x, 100), rows),
    "upsample2d": (lambda x: F.interpolate(x, scale_factor=(1.7, 2)), images),
    "upsample2d-down": (lambda x: F.interpolate(x, (4, 5)), images),
    "upsample3d": (lambda x: F.interpolate(x, scale_factor=2.5), volumes),
}
"""Of 8-bit integers only."""


EVERY = {**CASES, **UPSAMPLED}


def check(function: Function, x: Tensor, spec: QuantSpec, zero_point: int, out: str | None) -> Program:
    program = integer_form(captured(function, x), backend(fixed(spec, zero_point), out))
    program.verify()
    expected = moved(function, x, spec, zero_point)
    for found, wanted in zip(results(program, x), expected, strict=True):
        np.testing.assert_array_equal(found, real(wanted), strict=True)
    assert computes_on_integers(program, [x]), program
    return program


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("name", EVERY)
def test_a_move_gives_the_integers_that_went_in(name: str, kind: str) -> None:
    function, data = EVERY[name]
    check(function, data(), *SPECS[kind], "like x")


@pytest.mark.parametrize("kind", ["narrow", "int16"])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("pad", "max", "adaptive", "relu", "am"))])
def test_ranges_of_another_width_are_kept(name: str, kind: str) -> None:
    function, data = CASES[name]
    check(function, data(), *SPECS[kind], "like x")


@pytest.mark.parametrize("name", EVERY)
def test_what_is_read_in_float_is_dequantized_after_the_move(name: str) -> None:
    function, data = EVERY[name]
    check(function, data(), *SPECS["int8"], None)


# -- laws ------------------------------------------------------------------------------------------------------


@st.composite
def pools(draw: st.DrawFn) -> tuple[Function, tuple[int, ...]]:
    """A max pool over one, two or three axes, and the shape of what it reads."""
    rank = draw(st.integers(1, 3))
    axes = range(rank)
    kernel, stride, dilation = ([draw(st.integers(1, 3)) for _ in axes] for _ in range(3))
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    shape = tuple(draw(st.integers(d * (k - 1) + 1, 9)) for k, d in zip(kernel, dilation, strict=True))
    ceil = draw(st.booleans())
    pool: Function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    return lambda x: pool(x, kernel, stride, padding, dilation, ceil), (2, 2, *shape)


@settings(max_examples=30)
@given(pools(), st.sampled_from(["uint8", "int8"]), st.integers(0, 2**16))
def test_pools_of_any_shape(made: tuple[Function, tuple[int, ...]], kind: str, seed: int) -> None:
    function, shape = made
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4
    check(function, x, *SPECS[kind], "like x")


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3), st.integers(0, 2**16))
def test_adaptive_pools_of_any_size(sizes: list[tuple[int, int]], seed: int) -> None:
    pool: Function = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(sizes) - 1]
    x = torch.randn(2, 2, *(size for size, _ in sizes), generator=torch.Generator().manual_seed(seed)) * 4
    check(lambda x: pool(x, tuple(out for _, out in sizes)), x, *SPECS["int8"], "like x")


@settings(max_examples=15)
@given(st.floats(0.3, 4.0), st.floats(0.3, 4.0), st.sampled_from(["uint8", "int8"]))
def test_upsampling_by_any_factor(rows_by: float, columns_by: float, kind: str) -> None:
    check(lambda x: F.interpolate(x, scale_factor=(rows_by, columns_by)), images(), *SPECS[kind], "like x")


# -- clamps ----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    st.one_of(st.none(), st.floats(-6, 6)),
    st.one_of(st.none(), st.floats(-6, 6)),
    st.integers(0, 255),
    st.sampled_from([SCALE, 0.05, 0.013]),
)
def test_a_clamp_is_exact_on_the_same_grid_and_on_another(
    low: float | None, high: float | None, zero_point: int, out_scale: float
) -> None:
    if low is None and high is None:
        low = 0.0
    grid, other = fixed(UINT8, zero_point), fixed(INT8, 4, float(np.float32(out_scale)))
    out = "like x" if out_scale == SCALE else "other"
    x, to = images(), grid if out == "like x" else other
    program = integer_form(captured(lambda x: x.clamp(low, high), x), backend(grid, out, other))
    exact = levels(x, UINT8, zero_point) * np.float64(SCALE)
    if low is not None:
        exact = np.maximum(exact, low)
    if high is not None:
        exact = np.minimum(exact, high)
    steps = exact / np.float64(to.scale)
    wanted = np.clip(np.rint(steps) + to.zero_point, to.spec.qmin, to.spec.qmax) - to.zero_point
    found = results(program, x)[0]
    is_tie = np.abs(steps - np.floor(steps) - 0.5) < 1e-9  # exact - low / s and low / s - exact round apart
    np.testing.assert_array_equal(found[~is_tie], real(wanted, to.scale)[~is_tie])
    assert computes_on_integers(program, [x])


# -- refusals --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Function, str | None, QuantSpec, str]] = {
    "pad": (lambda x: F.pad(x, (1, 1), value=2.0), "like x", UINT8, "it pads with 2.0"),
    "clamp": (lambda x: x.clamp(-0.5, 1), None, UINT8, "its bounds need not lie on the grid"),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2), "like x", INT16, "ATen repeats bytes"),
    "all-padding": (lambda x: F.max_pool2d(x, 2, 1, 1, 2), None, UINT8, "in float that is minus infinity"),
    "below-the-grid": (lambda x: F.max_pool2d(x, 2, 1, 1, 2), "like x", NARROW, "lower than the grid goes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_stays_float_and_says_why(name: str) -> None:
    function, out, spec, reason = REFUSED[name]
    program = captured(function, images())
    made_for = backend(fixed(spec, 9), out)
    integer, qdq = integer_form(program, made_for), qc.convert(qc.prepare(program, made_for))
    assert [why for why in integer.plan.left_float.rows.values() if reason in why]
    assert integer.coverage().counts["float"] == 1
    torch.testing.assert_close(integer(images()), qdq(images()), rtol=0, atol=0)


def test_a_window_of_nothing_but_padding_is_the_lowest_of_the_grid() -> None:
    x = torch.randn(2, 3, 1, 1)
    check(lambda x: F.max_pool2d(x, 2, 1, 1, 2), x, *SPECS["int8"], "like x")


# -- the real tables -------------------------------------------------------------------------------------------


class Mover(nn.Module):
    """Moves of every kind between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.LazyConv2d(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.pad(self.first(x).relu(), (1, 1, 0, 2)), 3, 2, 1, ceil_mode=True)
        left, right = F.pixel_unshuffle(F.interpolate(x, scale_factor=2), 2).chunk(2, 1)
        x = torch.cat([left.flip(1), right.roll(1, 2), F.channel_shuffle(left, 4)], 1)
        x = x.permute(0, 2, 3, 1)[:, :, 1:].transpose(1, 3).clamp(0.25, 3)
        return torch.as_tensor(self.last(x[:, torch.tensor([0, 5, 1])]))


def lowered(model: nn.Module, x: Tensor, made_for: Backend) -> tuple[Program, Program]:
    with torch.no_grad():
        model(x)  # lazy modules learn their sizes
    prepared = qc.prepare(qc.capture(model.eval(), (x,)), made_for)
    qc.calibrate(prepared, [(x,)])
    return qc.convert(prepared), qc.convert(prepared, to="integer")


@pytest.mark.parametrize("made_for", [QNNPACK, X86, EXECUTORCH], ids=lambda made_for: made_for.name)
def test_moves_between_products_agree_with_the_float_form(made_for: Backend) -> None:
    torch.manual_seed(0)
    qdq, integer = lowered(Mover(), images(), made_for)
    step = 0.05 * float(qdq(images()).abs().max())  # the convolutions may flip a level; the moves must not add to it
    torch.testing.assert_close(integer(images()), qdq(images()), rtol=0, atol=step)
    exported = torch.export.export(integer.module, (images(),)).module()
    torch.testing.assert_close(exported(images()), integer(images()), rtol=0, atol=0)
    if made_for is QNNPACK:
        assert integer.coverage().counts["float"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("made_for", [QNNPACK, EXECUTORCH], ids=lambda made_for: made_for.name)
def test_compiled_moves_give_the_same_bits(made_for: Backend) -> None:
    torch.manual_seed(0)
    integer = lowered(Mover(), images(), made_for)[1]
    torch.testing.assert_close(torch.compile(integer.module)(images()), integer(images()), rtol=0, atol=0)
