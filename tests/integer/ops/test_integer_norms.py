"""Norms on integers, against exact sums in Python's integers and NumPy's float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.integer.fixed_point import common_shift
from quantc.integer.ops.integer_norms import (
    eps_of,
    fixed_places,
    integer_root,
    reciprocal_places,
    reciprocal_root,
)
from quantc.ir.dialect import op_name
from tests.support.integer_matches import (
    NARROW,
    Array,
    both,
    calibrated,
    floats_inside,
    integer_ops,
    less,
    onto_grid,
    some_integers,
    values_of,
)

SEEDS = st.integers(0, 2**32 - 1)

# -- the root ------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.integers(2**59, 2**62 - 1), min_size=1, max_size=20))
def test_the_root_is_that_of_python(values: list[int]) -> None:
    assert integer_root(torch.tensor(values)).tolist() == [math.isqrt(value) for value in values]


@settings(max_examples=200)
@given(st.lists(st.integers(2**30 - 2**28, 2**31 - 1), min_size=1, max_size=20), st.sampled_from([-1, 0, 1]))
def test_the_root_next_to_a_square(roots: list[int], more: int) -> None:
    values = [max(root * root + more, 2**59) for root in [*roots, 2**29, 2**30, 2**31 - 1]]
    assert integer_root(torch.tensor(values)).tolist() == [math.isqrt(value) for value in values]


@settings(max_examples=200)
@given(st.integers(1, 2**22), st.floats(0, 10), st.floats(1e-3, 1), st.data())
def test_the_reciprocal_is_rounded_down_once(length: int, eps: float, scale: float, data: st.DataObject) -> None:
    found = eps_of(length, 255, eps, scale)
    if found is None:
        assert length**2 * (255**2 + eps / scale**2) > 2**60
        return
    # where nothing deviates the root is of no use, and only must not be zero
    spreads = data.draw(st.lists(st.integers(1, 100) | st.integers(1, length**2 * 255**2), min_size=1, max_size=5))
    got = reciprocal_root(torch.tensor([*spreads, 0]), found.value, found.places, length).tolist()
    assert 0 <= got.pop() < 2**53
    for spread, reciprocal in zip(spreads, got, strict=True):
        variance = Fraction(spread) + Fraction(found.value, 2**found.places)
        # as many pairs of places as its whole part leaves room for in 61 bits
        pairs = (61 - math.floor(variance).bit_length()) // 2
        root = math.isqrt(math.floor(variance * 4**pairs))
        assert reciprocal == (1 << reciprocal_places(length) + pairs) // root


@settings(max_examples=200)
@given(st.integers(1, 2**24), st.sampled_from([127, 255, 65535]), st.floats(0, 1), st.floats(1e-4, 10))
def test_eps_has_all_the_places_there_is_room_for(length: int, reach: int, eps: float, scale: float) -> None:
    found = eps_of(length, reach, eps, scale)
    real = Fraction(eps) * length**2 / Fraction(scale) ** 2
    if found is None:
        assert length**2 * reach**2 + real > 2**60
        return
    assert 0 <= real - Fraction(found.value, 2**found.places) < Fraction(1, 2**found.places)
    assert found.value < 2**62
    assert found.places == 61 or found.value >= 2**61


# -- the op --------------------------------------------------------------------------------------------------------


def _normalized(rows: Array, eps: float, scale: float, centre: bool) -> tuple[Array, Array]:
    """The normalized numbers of rows of integers, and what they were divided by. Sums are exact, so only root and
    division are rounded."""
    total = rows.sum(axis=1, keepdims=True).astype(object) if centre else np.zeros((len(rows), 1), dtype=object)
    length = rows.shape[1]
    squares = np.array([[sum(int(item) ** 2 for item in row)] for row in rows], dtype=object)
    spread = squares * length - total * total
    variance = spread.astype(np.float64) + eps * length**2 / scale**2
    away = (rows.astype(object) * length - total).astype(np.float64)
    root = np.sqrt(variance)
    return np.divide(away, root, out=np.zeros_like(away), where=away != 0), root


def _adversarial(generator: np.random.Generator, length: int, dtype: torch.dtype) -> Tensor:
    """Random rows; constant ones; an outlier; a step; the least there can be; all at the ends of the range."""
    info = torch.iinfo(dtype)
    rows = some_integers(generator, (7, length), dtype)
    rows[1] = int(generator.integers(info.min, info.max))
    rows[2], rows[2, -1] = info.min, info.max
    rows[3], rows[3, : length // 2] = 3, 4
    rows[4], rows[4, 0] = 10, 11
    rows[5, ::2], rows[5, 1::2] = info.min, info.max
    return rows


def _check(
    x: Tensor, zero_point: int, eps: float, scale: float, gamma: Tensor, beta: Tensor, centre: bool, out: Any
) -> None:
    """Hold the op to its stated deviation, in both forms of its multiplier."""
    length = x.shape[-1]
    info = torch.iinfo(x.dtype)
    exact = eps_of(length, info.max - info.min, eps, scale)
    assert exact is not None
    normal, root = _normalized(less(x, zero_point), eps, scale, centre)
    wanted = normal * gamma.numpy() + beta.numpy()
    head = (x, zero_point, length, centre, exact.value, exact.places)
    found = both("normalize", *head, gamma * 2.0 ** -reciprocal_places(length), beta, None, *out)
    allowed = np.abs(normal * gamma.numpy()) * (2.0**-29 + root * 2.0**-52) + 1e-10
    assert _is_near(found, wanted, allowed, out)
    # in steps so small that the deviation is many of them
    fine = 2.0**20
    scaled = gamma * (fine * 2.0 ** -reciprocal_places(length))
    found = both("normalize", *head, scaled, beta * fine, None, *FINE)
    assert _is_near(found, wanted * fine, allowed * fine, FINE)
    places = fixed_places(length)
    mantissas = common_shift([gamma * 2.0**-places], [2**31], beta)
    assert mantissas is not None
    (mantissa,), offset, shift = mantissas
    found = both("normalize", *head, mantissa, offset, shift, *out)
    # a mantissa is off by half of its last place, as is the offset
    coarse = (np.abs(normal) * 2.0**places + 1) * 2.0 ** (-shift.double().numpy() - 1)
    assert _is_near(found, wanted, allowed + coarse + np.abs(gamma.numpy()) * 2.0**-places, out)


def _is_near(found: Tensor, wanted: Array, allowed: Array, out: tuple[int, int, int, torch.dtype]) -> bool:
    zero_point, qmin, qmax, _ = out
    levels = np.clip(wanted + zero_point, qmin, qmax)
    return bool((np.abs(found.numpy().astype(np.float64) - levels) <= 0.5 + allowed).all())


UINT8 = (100, 0, 255, torch.uint8)
FINE = (0, -(2**31), 2**31 - 1, torch.int32)


@settings(max_examples=150)
@given(
    st.integers(1, 70) | st.sampled_from([256, 768, 1000]),
    st.sampled_from(NARROW),
    st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 1.0]),
    st.floats(1e-3, 0.5),
    st.booleans(),
    SEEDS,
)
def test_a_norm_is_as_near_as_it_says(
    length: int, dtype: torch.dtype, eps: float, scale: float, centre: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    info = torch.iinfo(dtype)
    zero_point = int(generator.integers(info.min, info.max, endpoint=True))
    gamma = torch.from_numpy(generator.normal(0, 40, length))
    beta = torch.from_numpy(generator.normal(0, 20, length))
    _check(_adversarial(generator, length, dtype), zero_point, eps, scale, gamma, beta, centre, UINT8)


@pytest.mark.parametrize("length", [2**14, 2**16 + 1, 100_003])
@pytest.mark.parametrize("centre", [True, False])
def test_a_norm_of_very_long_rows(length: int, centre: bool) -> None:
    generator = np.random.default_rng(length)
    x = _adversarial(generator, length, torch.uint8)
    gamma, beta = (torch.tensor(value, dtype=torch.float64) for value in (37.3, -11.25))
    _check(x, 7, 1e-5, 0.02, gamma, beta, centre, UINT8)


def test_a_row_without_variance_becomes_beta() -> None:
    x = torch.full((2, 5), 9, dtype=torch.int8)
    beta = torch.tensor([-3.0, 0.5, 1.5, 2.5, 300.0], dtype=torch.float64)
    found = both("normalize", x, -4, 5, True, 0, 61, beta, beta, None, 0, -128, 127, torch.int8)
    assert found.tolist() == [[-3, 0, 2, 2, 127]] * 2


# -- through the rules ---------------------------------------------------------------------------------------------


def _filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.5, generator=generator)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.3, 2.0, generator=generator)
    return module.eval()


class NormRelu(nn.Module):
    """A batch norm with a relu, that nothing comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x))


NORMS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "layer": ("normalize", lambda: nn.LayerNorm(8)),
    "layer over two axes": ("normalize", lambda: nn.LayerNorm([5, 8], eps=1e-3)),
    "layer without gamma": ("normalize", lambda: nn.LayerNorm(8, elementwise_affine=False)),
    "layer without beta": ("normalize", lambda: nn.LayerNorm(8, bias=False)),
    "rms": ("normalize", lambda: nn.RMSNorm(8)),
    "rms with eps": ("normalize", lambda: nn.RMSNorm([5, 8], eps=1e-2)),
    "group": ("normalize", lambda: nn.GroupNorm(3, 6)),
    "group without gamma": ("normalize", lambda: nn.GroupNorm(1, 6, affine=False)),
    "instance": ("normalize", lambda: nn.InstanceNorm2d(6, affine=True)),
    "instance without gamma": ("normalize", lambda: nn.InstanceNorm2d(6)),
    "instance with statistics": ("sum", lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    "batch": ("sum", lambda: nn.BatchNorm2d(6)),
    "batch without gamma": ("sum", lambda: nn.BatchNorm2d(6, affine=False)),
    "batch and relu": ("sum", NormRelu),
}


def _prepared(name: str) -> tuple[qc.Program, Tensor]:
    x = torch.randn(3, 6, 5, 8, generator=torch.Generator().manual_seed(0)) * 2 + 0.5
    return calibrated(qc.capture(_filled(NORMS[name][1]()), (x,)), "qnnpack", [x]), x


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_within_a_step_of_its_float_form(name: str) -> None:
    prepared, x = _prepared(name)
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    assert [str(node.target) for node in integer_ops(lowered)] == [f"quantc.{NORMS[name][0]}.default"]
    assert not floats_inside(lowered)
    last = next(node for node in reversed(converted.graph.nodes) if node.op == "call_function")
    steps = (lowered(x) - converted(x)).detach() / float(last.args[1])
    assert float(steps.abs().max()) <= 1.001
    assert float((steps.abs() > 0.5).double().mean()) <= 0.002
    assert torch.equal(qc.convert(prepared, to="integer", style="decomposed")(x), lowered(x))
    fixed = (qc.convert(prepared, to="integer", multiplier="fixed")(x) - lowered(x)) / float(last.args[1])
    assert float(fixed.abs().max()) <= 1.001
    assert float((fixed.abs() > 0.5).double().mean()) <= 0.002
    exported = torch.export.export(lowered.module, (x,)).module()
    assert torch.equal(exported(x), lowered(x))


def test_a_batch_norm_is_its_formula_to_the_bit() -> None:
    prepared, x = _prepared("batch and relu")
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    (norm,) = [node for node in converted.graph.nodes if op_name(node) == "batch_norm"]
    (relu,) = norm.users
    (quantizer,) = relu.users
    values = values_of(converted, [x])
    source, scale, zero_point = norm.args[0].args[:3]
    gamma, beta, mean, var = (values[node.name].detach().double().numpy() for node in norm.args[1:5])
    factor = gamma / np.sqrt(var + 1e-5)
    step, out_step = np.float64(np.float32(scale)), np.float64(np.float32(quantizer.args[1]))
    shape = (1, -1, 1, 1)
    steps = less(values[source.name], zero_point) * (step * factor / out_step).reshape(shape)
    steps = steps + ((beta - mean * factor) / out_step).reshape(shape)
    wanted = onto_grid(np.maximum(steps, 0), *quantizer.args[2:])
    (made,) = integer_ops(lowered)
    assert torch.equal(values_of(lowered, [x])[made.name], wanted)


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_any_number_of_rows() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    generator = torch.Generator().manual_seed(0)
    x, more = (torch.randn(size, 4, 8, generator=generator) for size in (5, 11))
    program = qc.capture(_filled(nn.LayerNorm(8)), (x,), dynamic_shapes=({0: batch},))
    prepared = calibrated(program, "qnnpack", [x])
    lowered = qc.convert(prepared, to="integer")
    assert [str(node.target) for node in integer_ops(lowered)] == ["quantc.normalize.default"]
    for rows in (x, more):
        assert torch.equal(lowered(rows), qc.convert(prepared, to="integer", style="decomposed")(rows))
    assert torch.equal(lowered(torch.cat([x, x])), torch.cat([lowered(x), lowered(x)]))


@pytest.mark.parametrize("make", [lambda: nn.InstanceNorm1d(4), lambda: nn.GroupNorm(2, 4)])
def test_rows_of_unknown_length_stay_float(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    sizes = torch.export.Dim("length", min=2, max=64)
    program = qc.capture(_filled(make()), (x,), dynamic_shapes=({2: sizes},))
    lowered = qc.convert(calibrated(program, "qnnpack", [x]), to="integer")
    assert not integer_ops(lowered)
    (reason,) = lowered.plan.left_float.rows.values()
    assert reason == "how many elements it normalizes together is not known before it runs"


def test_a_computed_gamma_keeps_a_norm_float() -> None:
    class Computed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (8,), x[0, 0].abs())

    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    lowered = qc.convert(calibrated(qc.capture(Computed().eval(), (x,)), "qnnpack", [x]), to="integer")
    assert any("is not a constant" in reason for reason in lowered.plan.left_float.rows.values())
