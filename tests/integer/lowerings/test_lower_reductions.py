"""How sums and averages are written on integers: pools and means, from the model to the integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.integer.library import OPS
from quantc.integer.lowerings.lower_reductions import windows_along
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.passes.decompose_integer import DecomposeInteger
from quantc.patterns import aten
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import INT16, UINT8
from tests.support.integer_matches import Array, Match, calibrated, floats_inside, integer_ops, same, values_of
from tests.support.integer_oracle_sums import adaptive_windows, pool_windows, sum_windows

SEEDS = st.integers(0, 2**32 - 1)


class Model(nn.Module):
    """A reduction of what comes quantized."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(x * 1.5)


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3


def lowered(reduce: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> tuple[Program, Program]:
    """The Q/DQ program and the integer program."""
    prepared = calibrated(qc.capture(Model(reduce).eval(), (x,)), "qnnpack", (x,))
    return qc.convert(prepared), qc.convert(prepared, to="integer", **options)


def check_program(name: str, reduce: Callable[[Tensor], Tensor], x: Tensor, sums: Callable[[Array], Any]) -> None:
    """An average as an integer program; `sums` gives exact sums of integers, and how many places each counts for."""
    simulated, integer = lowered(reduce, x)
    integer.verify()
    match = Match(simulated, name, (x,))
    ints, scale = match.operands[0]
    acc, count = sums(ints)
    expected = match.rounded(acc * (scale / (match.out_scale * count)))
    written = integer_ops(integer)[-1]
    assert len(integer_ops(integer)) == 2
    assert same(values_of(integer, (x,))[written.name], expected)
    assert not floats_inside(integer)
    assert (integer(x) - simulated(x)).abs().max() <= match.out_scale * 1.001
    decomposed = qc.Pipeline((DecomposeInteger(),)).run(integer)
    assert torch.equal(decomposed(x), integer(x))


POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE: dict[int, Any] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Sizes, and the arguments of a pool over them."""
    rank = draw(st.integers(1, 3))
    sizes = [draw(st.integers(3, 7)) for _ in range(rank)]
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    options: dict[str, Any] = {
        "kernel_size": kernel if draw(st.booleans()) else kernel[0],
        "stride": draw(st.none() | st.integers(1, 4)),
        "padding": draw(st.integers(0, min(kernel) // 2)),
        "ceil_mode": draw(st.booleans()),
        "count_include_pad": draw(st.booleans()),
    }
    if rank > 1:
        options["divisor_override"] = draw(st.none() | st.integers(1, 6))
    return sizes, options


@settings(max_examples=200)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2), st.booleans(), st.booleans(), SEEDS)
def test_windows_are_where_torch_has_them(
    size: int, kernel: int, stride: int, padding: int, ceil_mode: bool, count_padding: bool, seed: int
) -> None:
    padding = min(padding, kernel // 2)
    size = max(size, kernel - 2 * padding)
    found = windows_along(size, kernel, stride, padding, ceil_mode, count_padding)
    x = torch.randint(0, 256, (2, 1, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    one, edges = torch.ones((), dtype=torch.float64), [found.before, found.after]
    totals = OPS["sum_windows"].target(x, 0, [kernel], [stride], edges, one, None, 0, 0, 0, torch.float32)
    averages = totals.double() / torch.tensor(found.counts)
    expected = F.avg_pool1d(x.double(), kernel, stride, padding, ceil_mode, count_padding)
    torch.testing.assert_close(averages, expected, rtol=1e-12, atol=0)


@settings(max_examples=12)
@given(pools(), SEEDS)
def test_pools_are_written_as_torch_has_them(pool: tuple[list[int], dict[str, Any]], seed: int) -> None:
    sizes, options = pool
    rank = len(sizes)

    def spread(value: Any) -> list[int]:
        return [value] * rank if isinstance(value, int) else value

    kernel = spread(options["kernel_size"])
    stride = spread(options["stride"] or kernel)
    rows = zip(sizes, kernel, stride, spread(options["padding"]), strict=True)
    windows = [pool_windows(*row, options["ceil_mode"], options["count_include_pad"]) for row in rows]

    def sums(ints: Array) -> Any:
        acc, counts = sum_windows(ints, windows)
        counts = options.get("divisor_override") or counts
        torch.testing.assert_close(POOLS[rank](torch.from_numpy(ints).double(), **options).numpy(), acc / counts)
        return acc, counts

    check_program(f"avg_pool{rank}d", lambda x: POOLS[rank](x, **options), image(2, 2, *sizes, seed=seed), sums)


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5) | st.none()), min_size=1, max_size=3), SEEDS)
def test_adaptive_pools_are_written_as_torch_has_them(rows: list[tuple[int, int | None]], seed: int) -> None:
    rank = len(rows)
    outputs: Any = tuple(count for _, count in rows) if rank > 1 else rows[0][1] or rows[0][0]
    windows = [adaptive_windows(size, count or size) for size, count in rows]

    def sums(ints: Array) -> Any:
        acc, counts = sum_windows(ints, windows)
        torch.testing.assert_close(ADAPTIVE[rank](torch.from_numpy(ints).double(), outputs).numpy(), acc / counts)
        return acc, counts

    x = image(2, 3, *(size for size, _ in rows), seed=seed)
    check_program(f"adaptive_avg_pool{rank}d", lambda x: ADAPTIVE[rank](x, outputs), x, sums)


@pytest.mark.parametrize("outputs", [1, (1, 1), (1, 5), (3, 4), (6, 7)])
def test_adaptive_pools_without_a_batch(outputs: Any) -> None:
    sizes = (outputs, outputs) if isinstance(outputs, int) else outputs
    windows = [adaptive_windows(size, count) for size, count in zip((6, 7), sizes, strict=True)]
    x = image(3, 6, 7)
    check_program(
        "adaptive_avg_pool2d",
        lambda x: F.adaptive_avg_pool2d(x, outputs),
        x,
        lambda ints: sum_windows(ints, windows),
    )


@pytest.mark.parametrize("kind", ["mean", "sum"])
@pytest.mark.parametrize("dims", [(2, 3), (-1,), (0, -2), (3, 1), None, ()], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_means_and_sums_over_axes(kind: str, dims: tuple[int, ...] | None, keepdim: bool) -> None:
    x = image(2, 3, 4, 5)

    def reduce(x: Tensor) -> Tensor:
        found: Tensor = getattr(x, kind)(dims, keepdim=keepdim)
        return found

    def sums(ints: Array) -> Any:
        axes = tuple(dims or range(4))
        count = np.prod([ints.shape[axis] for axis in axes]) if kind == "mean" else 1
        return ints.sum(axis=axes, keepdims=keepdim), count

    check_program(kind, reduce, x, sums)


def test_the_mean_of_everything() -> None:
    check_program("mean", lambda x: x.mean(), image(3, 4), lambda ints: (ints.sum(), ints.size))


@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        ("mean", lambda x: x.mean((2, 3))),
        ("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
        ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (3, 4))),
        ("sum", lambda x: x.sum(1)),
    ],
)
def test_averages_in_fixed_form_are_as_close(name: str, reduce: Any) -> None:
    """A mantissa of 31 bits moves a result by less than 2^-20 steps, so only ties may go the other way."""
    x = image(2, 3, 7, 9, seed=3)
    simulated, fixed = lowered(reduce, x, multiplier="fixed")
    match, written = Match(simulated, name, (x,)), integer_ops(fixed)[-1]
    ints, scale = match.operands[0]
    steps = reduce(torch.from_numpy(ints).double()).numpy() * scale / match.out_scale
    tie = np.abs(np.abs(steps - np.floor(steps)) - 0.5) < 2.0**-20
    off = (values_of(fixed, (x,))[written.name].long() - match.rounded(steps).long()).abs().numpy()
    assert off[~tie].max(initial=0) == 0
    assert off.max() <= 1
    constants = [fixed.tensor(node) for node in written.all_input_nodes]
    assert not any(item is not None and item.dtype.is_floating_point for item in constants)


READING = Backend(
    "reading-averages",
    RuleTable("reading-averages", (Rule("mean", aten.mean, {"x": "act"}), Rule("pool", aten.avg_pool, {"x": "act"}))),
    roles={"act": UINT8},
    summary="reads integers and yields floats, for tests",
)


@pytest.mark.parametrize("name", ["mean", "avg_pool2d"])
def test_averages_that_are_read_in_float_are_float(name: str) -> None:
    x = image(1, 2, 4, 6)
    reduce = (lambda x: x.mean(-1)) if name == "mean" else (lambda x: F.avg_pool2d(x, (1, 6)).squeeze(-1))
    prepared = calibrated(qc.capture(Model(reduce).eval(), (x,)), READING, (x,))
    ints, scale = Match(qc.convert(prepared), name, (x,)).operands[0]
    expected = torch.from_numpy((ints.sum(axis=-1) * (scale / 6)).astype(np.float32))
    assert same(qc.convert(prepared, to="integer")(x), expected)


# -- dynamic sizes -------------------------------------------------------------------------------------------------

BATCH, HEIGHT = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("height", min=5, max=64)


def dynamic(reduce: Callable[[Tensor], Tensor], axis: int, name: Any) -> tuple[Program, Program]:
    x = image(4, 2, 9, 6)
    program = qc.capture(Model(reduce).eval(), (x,), dynamic_shapes={"x": {axis: name}})
    prepared = calibrated(program, "qnnpack", (x,))
    return qc.convert(prepared), qc.convert(prepared, to="integer")


@pytest.mark.parametrize(
    ("reduce", "axis", "name"),
    [
        (lambda x: x.mean((2, 3)), 0, BATCH),
        (lambda x: F.adaptive_avg_pool2d(x, (4, 4)), 0, BATCH),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), 0, BATCH),
        (lambda x: x.sum(1), 2, HEIGHT),
        (lambda x: F.avg_pool2d(x, 3, 2, 1), 2, HEIGHT),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False, divisor_override=4), 2, HEIGHT),
    ],
)
def test_sizes_that_no_count_depends_on_may_be_dynamic(reduce: Any, axis: int, name: Any) -> None:
    simulated, integer = dynamic(reduce, axis, name)
    assert len(integer_ops(integer)) == 2
    decomposed = qc.Pipeline((DecomposeInteger(),)).run(integer)
    for size in (5, 12):
        shape = [4, 2, 9, 6]
        shape[axis] = size
        x = image(*shape, seed=size)
        found = integer(x)
        scale = Match(simulated, _core(simulated), (x,)).out_scale
        assert (found - simulated(x)).abs().max() <= scale * 1.001
        assert torch.equal(decomposed(x), found)


def _core(program: Program) -> str:
    return [op_name(node) for node in program.graph.nodes if node in program.plan.claims][-1]


@pytest.mark.parametrize(
    ("reduce", "reason"),
    [
        (lambda x: x.mean(2), "how many elements it adds depends on a size that is dynamic"),
        (lambda x: x.sum((2, 3)), "how many elements it adds depends on a size that is dynamic"),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), "how much its windows cover depends on a size"),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), "how much its windows cover depends on a size"),
        (lambda x: F.adaptive_avg_pool2d(x, 3), "how much its windows cover depends on a size"),
    ],
)
def test_counts_that_depend_on_a_dynamic_size_stay_in_float(reduce: Any, reason: str) -> None:
    simulated, integer = dynamic(reduce, 2, HEIGHT)
    assert reason in "".join(integer.plan.left_float.rows.values())
    x = image(4, 2, 13, 6)
    assert torch.equal(integer(x), simulated(x))


# -- what does not fit ---------------------------------------------------------------------------------------------

WIDE = Backend(
    "wide-averages",
    RuleTable("wide-averages", (Rule("mean", aten.mean, {"x": "act", "out": "act"}),)),
    roles={"act": INT16.but(scheme="affine")},
    summary="activations of 16 bits, for tests",
)


@pytest.mark.parametrize(("count", "fits"), [(32768, True), (32769, False)])
def test_sums_that_may_leave_an_int32_stay_in_float(count: int, fits: bool) -> None:
    """All numbers lie on one side: the largest is 65535 steps away from zero, and 32768 of them just fit."""
    x = torch.linspace(0.0, 100.0, count).reshape(1, count)
    prepared = calibrated(qc.capture(Model(lambda x: x.mean(1)).eval(), (x,)), WIDE, (x,))
    integer = qc.convert(prepared, to="integer")
    assert bool(integer_ops(integer)) == fits
    assert fits or f"a sum of {count} elements may leave an int32" in "".join(integer.plan.left_float.rows.values())
    if fits:
        match = Match(qc.convert(prepared), "mean", (x,))
        ints, scale = match.operands[0]
        assert abs(ints).max() == 65535
        steps = ints.sum(axis=1) * (scale / (match.out_scale * count))
        assert same(values_of(integer, (x,))[integer_ops(integer)[-1].name], match.rounded(steps))


def test_a_mean_in_another_dtype_stays_in_float() -> None:
    x = image(2, 3)
    program = lowered(lambda x: x.mean(1), x)[0]
    (core,) = [node for node in program.graph.nodes if node.target is torch.ops.aten.mean.dim]
    core.update_kwarg("dtype", torch.float64)
    integer = qc.Pipeline.parse("lower-integer,eliminate-dead").run(program)
    assert "its result is torch.float64" in "".join(integer.plan.left_float.rows.values())
