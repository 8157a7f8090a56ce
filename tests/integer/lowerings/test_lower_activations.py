"""Functions of one number on integers, against `math` and NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import quantc as qc
from quantc.integer.grid import Grid
from quantc.integer.lowerings.step_tables import LOWEST, first_accumulator, step_table, steps_of
from quantc.integer.match_lowering import NotIntegerError, Task
from quantc.integer.ops.lookup_tables import table_of
from quantc.integer.semantics import semantics_of
from quantc.ir.curves import Curve, prelu
from quantc.ir.dialect import curve_of, op_name
from tests.support.activation_grids import SEEDS, Of, grid
from tests.support.integer_matches import NARROW, both, calibrated, floats_inside, integer_ops, some_integers

aten = torch.ops.aten
Real = Callable[[float], float]


# -- by hand -------------------------------------------------------------------------------------------------------


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _expm1(x: float) -> float:
    return math.expm1(min(x, 0.0))


def _tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ONE: dict[str, tuple[tuple[Any, ...], Real]] = {
    "relu": ((), lambda x: max(x, 0.0)),
    "clamp": ((-1.5, 2), lambda x: min(max(x, -1.5), 2.0)),
    "clamp to nothing": ((2, -1.5), lambda x: -1.5),
    "hardswish": ((), lambda x: x * min(max(x + 3, 0), 6) / 6),
    "hardsigmoid": ((), lambda x: min(max(x + 3, 0), 6) / 6),
    "silu": ((), lambda x: x * _sigmoid(x)),
    "mish": ((), lambda x: x * math.tanh(_softplus(x))),
    "gelu": ((), lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2))),
    "gelu tanh": (("tanh",), _tanh_gelu),
    "leaky_relu": ((), lambda x: x if x > 0 else 0.01 * x),
    "leaky_relu falling": ((-0.3,), lambda x: x if x > 0 else -0.3 * x),
    "elu": ((), lambda x: x if x > 0 else _expm1(x)),
    "elu falling": ((-0.5, 2.0, 1.5), lambda x: 2 * x if x > 0 else -1.0 * _expm1(1.5 * x)),
    "selu": ((), lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * _expm1(x))),
    "celu": ((2.5,), lambda x: x if x > 0 else 2.5 * _expm1(x / 2.5)),
    "sigmoid": ((), _sigmoid),
    "tanh": ((), math.tanh),
    "softplus": ((), lambda x: x if x > 20 else _softplus(x)),
    "softplus that drops": ((3.0, 1.0), lambda x: x if x * 3.0 > 1 else _softplus(3 * x) / 3),
}
"""Options of the op, and what it is by definition."""


def curve(name: str) -> Curve:
    """What the table of curves has for an op with its options."""
    graph, op = fx.Graph(), name.partition(" ")[0]
    target, options = getattr(aten, op).default, ONE[name][0]
    x = graph.placeholder("x")
    named = {"approximate": options[0]} if op == "gelu" and options else {}
    found = curve_of(graph.call_function(target, (x, *(() if named else options)), named))
    assert found is not None
    return found


def is_rounding_of(level: int, real: float, out: Grid, within: float = 1e-9) -> bool:
    """Whether an integer of a grid is what a number of its steps rounds to; by a tie it may be either neighbour."""
    steps = real / out.one_scale
    either = {round(steps - within), round(steps + within)}
    return level in {min(max(item + out.one_zero_point, out.qmin), out.qmax) for item in either}


# -- curves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE)
def test_a_curve_is_its_definition_and_keeps_its_direction_on_each_piece(name: str) -> None:
    found, by_hand = curve(name), ONE[name][1]
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.linspace(-3, 1, 4001)]).double().sort().values
    y = found.function(x.reshape(1, -1)).reshape(-1)
    np.testing.assert_allclose(y.numpy(), [by_hand(item) for item in x.tolist()], rtol=1e-12, atol=1e-13)
    begin = -math.inf
    for piece in found.pieces:
        until = float(piece.until)
        here = y[(x > begin) & (x <= until)]
        change = here.diff() if piece.rises else -here.diff()
        assert bool((change >= -1e-15).all()), (name, piece)
        begin = max(begin, until)
    assert begin == math.inf


# -- steps ---------------------------------------------------------------------------------------------------------

SCALES = st.floats(1e-6, 0.3) | st.sampled_from([2.0**-10, 0.25, 0.5])
EIGHT_BITS = st.sampled_from([torch.uint8, torch.int8])


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


# -- tables --------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.sampled_from(list(ONE)), st.floats(1e-3, 0.1), st.floats(1e-3, 0.1), EIGHT_BITS, EIGHT_BITS, st.data())
def test_a_table_has_what_the_function_makes_of_every_integer(
    name: str, scale: float, out_scale: float, dtype: torch.dtype, out_dtype: torch.dtype, data: st.DataObject
) -> None:
    x, out = (
        grid(step, data.draw(st.integers(torch.iinfo(kind).min, torch.iinfo(kind).max)), kind)
        for step, kind in ((scale, dtype), (out_scale, out_dtype))
    )
    every = torch.arange(x.qmin, x.qmax + 1).to(dtype)
    found = both("lookup", every, table_of(curve(name), x, out), 0)
    assert found.dtype == out_dtype
    for q, level in zip(every.tolist(), found.tolist(), strict=True):
        assert is_rounding_of(level, ONE[name][1]((q - x.one_zero_point) * x.one_scale), out)


def test_a_table_of_16_bits() -> None:
    x, out = grid(1e-4, 1000, torch.int16), grid(1e-4, -7, torch.int16)
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    found = both("lookup", every, table_of(curve("silu"), x, out), 0)
    real = (np.arange(-(2**15), 2**15) - 1000) * x.one_scale
    exact = real / (1 + np.exp(-real)) / out.one_scale
    assert np.abs(found.numpy() - np.clip(exact - 7, -(2**15), 2**15 - 1)).max() < 0.5 + 1e-9


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(NARROW), st.data(), SEEDS)
def test_a_lookup_takes_the_entry_of_its_row(
    shape: list[int], dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] = max(shape[axis], 1)
    generator = np.random.default_rng(seed)
    x, least = some_integers(generator, shape, dtype), torch.iinfo(dtype).min
    table = generator.integers(-128, 127, (shape[axis], torch.iinfo(dtype).max - least + 1)).astype(np.int8)
    found = both("lookup", x, torch.from_numpy(table), axis)
    for index in range(shape[axis]):
        wanted = table[index][x.select(axis, index).numpy().astype(np.int64) - least]
        assert np.array_equal(found.select(axis, index).numpy(), wanted)


# -- through the rules ---------------------------------------------------------------------------------------------

LONE: dict[str, Callable[[Tensor], Tensor]] = {
    "hardswish": F.hardswish,
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 2.0),
    "softplus": lambda x: F.softplus(x, 2.0),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1, -0.4, 0.0])),
    "prelu with one slope": lambda x: F.prelu(x, torch.tensor([0.25])),
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax over channels": lambda x: torch.softmax(x, 1),
}


def _lone(name: str) -> tuple[qc.Program, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 7) * 3
    return calibrated(qc.capture(Of(LONE[name]).eval(), (x,)), "qnnpack", [x]), x


def _out_scale(program: qc.Program) -> float:
    """The scale of what the last node dequantizes."""
    last = next(node for node in reversed(program.graph.nodes) if node.op == "call_function")
    return float(last.args[1])


@pytest.mark.parametrize("name", LONE)
def test_a_lone_op_is_within_a_step_of_its_float_form(name: str) -> None:
    prepared, x = _lone(name)
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    assert len(integer_ops(lowered)) == 1
    assert not floats_inside(lowered)
    steps = (lowered(x) - converted(x)) / _out_scale(converted)
    assert float(steps.abs().max()) <= 1.001
    assert float((steps.abs() > 0.5).double().mean()) < 0.02
    assert torch.equal(qc.convert(prepared, to="integer", style="decomposed")(x), lowered(x))
    assert torch.equal(qc.convert(prepared, to="integer", multiplier="fixed")(x), lowered(x))
    exported = torch.export.export(lowered.module, (x,)).module()
    assert torch.equal(exported(x), lowered(x))


# -- refusals ------------------------------------------------------------------------------------------------------


def _match(name: str, forward: Callable[..., Tensor], backend: str) -> tuple[Task, fx.Node]:
    """The match that is one named op of a converted program, and the node that quantizes its result."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    program = qc.convert(calibrated(qc.capture(Of(forward).eval(), (x,)), backend, [x]))
    (core,) = [node for node in program.graph.nodes if op_name(node) == name]
    (quantizer,) = core.users
    return Task(program, (core,)), quantizer


def test_a_result_of_16_bits_has_no_table_of_steps() -> None:
    task, quantizer = _match("gelu", F.gelu, "qnnpack")
    steps_of(task, torch.tensor(0.1), task.core, quantizer)
    quantizer.args = (*quantizer.args[:3], -(2**15), 2**15 - 1, torch.int16)
    with pytest.raises(NotIntegerError, match="more than 8 bits"):
        steps_of(task, torch.tensor(0.1), task.core, quantizer)


def test_slopes_and_scales_must_lie_along_one_axis() -> None:
    task, quantizer = _match("prelu", lambda x: F.prelu(x, torch.full((8,), 0.5)), "qnnpack")
    assert steps_of(task, torch.full((8,), 0.1), task.core, quantizer).axis == -1
    with pytest.raises(NotIntegerError, match="different axes"):
        steps_of(task, torch.full((4, 1), 0.1), task.core, quantizer)


@pytest.mark.parametrize("name", ["silu", "softmax"])
def test_a_result_that_is_read_in_float_has_no_table(name: str) -> None:
    task, quantizer = _match(name, LONE[name], "qnnpack")
    (dequantizer,) = quantizer.users
    task.program.replace(dequantizer, task.core)
    row = semantics_of(task.core)
    assert row is not None
    with pytest.raises(NotIntegerError, match="read in float"):
        row.write(task)


def test_a_function_with_options_that_make_no_sense_has_no_curve() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert curve_of(graph.call_function(aten.softplus.default, (x, 0.0))) is None
    assert curve_of(graph.call_function(aten.celu.default, (x, 0.0))) is None
    assert curve_of(graph.call_function(aten.erf.default, (x,))) is None
