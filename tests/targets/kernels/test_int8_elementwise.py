"""Kernels on bytes that are no products, each against the op of the integer form it stands for, on bytes of any kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.nn import functional

import quantc as qc
from quantc.errors import InputError
from quantc.integer.lowerings.lower_reductions import windows_along
from quantc.integer.ops.integer_norms import eps_of, reciprocal_places
from quantc.integer.ops.softmax import powers_of
from quantc.integer.semantics import load
from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels.int8_elementwise import BYTES, QuantizeKernel
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernels_for
from quantc.testing.synthesis import Sketch

load()
CLOSE = 2e-6
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
FILLS = ("any", "alike", "nearly", "ends")
dtypes = st.sampled_from(BYTES)
seeds = st.integers(0, 2**20)


def levels(shape: tuple[int, ...], dtype: torch.dtype, fill: str, seed: int) -> Tensor:
    """Bytes of any kind, all alike, nearly alike, or at both ends."""
    maker = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    if fill == "any":
        return torch.randint(info.min, info.max + 1, shape, dtype=dtype, generator=maker)
    if fill == "ends":
        return torch.where(torch.rand(shape, generator=maker) < 0.5, info.min, info.max).to(dtype)
    base = torch.full(shape, int(torch.randint(info.min + 1, info.max, (), generator=maker)), dtype=dtype)
    few = (torch.rand(shape, generator=maker) < 0.05).to(dtype)
    return base + few if fill == "nearly" else base


def kernels_of(op: str, *args: Any) -> tuple[list[tuple[Kernel, list[Tensor]]], Any]:
    """The kernels that are offered for a call, with what each is to be given; and what the op itself yields."""
    sketch = Sketch()
    target: Any = getattr(torch.ops.quantc, op, None) or getattr(torch.ops.aten, op)
    target = getattr(target, "vec", None) or target.default if op not in dir(torch.ops.quantc) else target.default

    def node_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return sketch.input("x", value) if value.dtype in BYTES else sketch.constant("c", value)

    node = sketch.call(target, map_aggregate(args, node_of))
    call = Call(sketch.program(node), node)
    found: list[tuple[Kernel, list[Tensor]]] = []
    for maker in kernels_for("x86")[call.op]:
        try:
            made = maker(call)
        except NoKernelError:
            continue
        placement = made if isinstance(made, Placement) else Placement(made, call.inputs)
        found.append((placement.kernel, [sketch.values[item] for item in placement.inputs]))
    return found, sketch.values[node]


def check(op: str, *args: Any, least: int = 1) -> list[str]:
    """Hold every kernel that is offered for a call to its op, however its operands lie in memory; their names."""
    found, expected = kernels_of(op, *args)
    assert len(found) >= least, f"{op} has {len(found)} kernels"
    for kernel, inputs in found:
        for in_order in (True, False):
            kernel.in_order = in_order
            for lay in (lambda x: x, lying_channels_last, strided, by_odd_strides, by_odd_strides_last):
                laid = [lay(x) for x in inputs]
                before = [x.clone() for x in laid]
                made = kernel(*laid)
                assert made.dtype is expected.dtype
                assert made.shape == expected.shape
                assert not in_order or made.is_contiguous(), kernel.name
                assert all(torch.equal(x, kept) for x, kept in zip(laid, before, strict=True)), "written over"
                if not expected.numel():
                    continue
                apart = float((made.double() - expected.double()).abs().max())
                if expected.dtype.is_floating_point:
                    assert apart <= CLOSE * float(expected.abs().max()) + 1e-30, (kernel.name, apart)
                else:
                    assert apart <= 1, (kernel.name, apart)
    return [kernel.name for kernel, _ in found]


def lying_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=LAYOUTS[x.dim()]) if x.dim() in LAYOUTS else x


def strided(x: Tensor) -> Tensor:
    """The same numbers with gaps between them."""
    return torch.stack([x, x], -1).select(-1, 1) if x.dim() else x


def by_odd_strides(x: Tensor) -> Tensor:
    """The same tensor, in which the strides of axes of one place, which are never used, say nothing."""
    strides = [stride if size > 1 else 1 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


def by_odd_strides_last(x: Tensor) -> Tensor:
    return by_odd_strides(lying_channels_last(x))


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@st.composite
def grids(draw: Any) -> tuple[int, int, int, torch.dtype]:
    """Zero point, bounds and dtype of a result."""
    dtype = draw(dtypes)
    info = torch.iinfo(dtype)
    zero_point = draw(st.integers(info.min, info.max))
    bounds = draw(st.sampled_from(["all", "relu", "within"]))
    low, high = {"all": (info.min, info.max), "relu": (zero_point, info.max), "within": (info.min + 3, info.max - 90)}[
        bounds
    ]
    return zero_point, low, high, dtype


FLOAT = (0, 0, 0, torch.float32)
scales = st.floats(1e-3, 20.0)
zero_points = st.integers(0, 127)
shapes = st.sampled_from(
    [(1,), (37,), (3, 5), (2, 33, 4, 5), (1, 1, 3, 3), (2, 8, 1, 1), (1, 40, 1, 6), (0, 4, 2, 2), (2, 3, 2, 3, 4)]
)


# -- element by element ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(shape=shapes, dtype=dtypes, out=st.one_of(grids(), st.just(FLOAT)), first=scales, second=scales, zeros=st.tuples(
    zero_points, zero_points), sign=st.sampled_from([1.0, -1.0]), seed=seeds, fill=st.sampled_from(FILLS))  # fmt: skip
def test_sums_of_two(
    shape: Any, dtype: Any, out: Any, first: float, second: float, zeros: Any, sign: float, seed: int, fill: str
) -> None:
    x, y = levels(shape, dtype, fill, seed), levels(shape, dtype, "any", seed + 1)
    multipliers = [number(first), number(sign * second)]
    names = check("sum", [x, y], list(zeros), multipliers, None, None, *out)
    assert ("quantized add" in names) == (out[-1] is dtype)


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(2, 33, 4, 5), (3, 5), (2, 4, 1, 3)]),
    kind=st.sampled_from(["number", "channels", "broadcast", "three", "mixed"]),
    out=st.one_of(grids(), st.just(FLOAT)),
    scale=scales,
    zeros=st.tuples(zero_points, zero_points, zero_points),
    seed=seeds,
)
def test_other_sums(shape: Any, kind: str, out: Any, scale: float, zeros: Any, seed: int) -> None:
    x, y = levels(shape, torch.uint8, "any", seed), levels(shape, torch.uint8, "any", seed + 1)
    channels = torch.rand(shape[1], *[1] * (len(shape) - 2), dtype=torch.float64) + 0.1
    column, row = y[..., :1].contiguous(), y[:1].contiguous()
    mixed = levels(shape, torch.int8, "any", seed + 2)
    terms, multipliers, offset = {
        "number": ([x], [number(-scale)], number(7.5)),
        "channels": ([x], [channels * scale], channels * -3),
        "broadcast": ([column, row], [number(scale), number(0.3)], None),
        "three": ([x, column, y], [number(scale), number(0.3), number(1.7)], number(-1.25)),
        "mixed": ([mixed, x], [number(scale), channels if len(shape) > 2 else number(1.0)], None),
    }[kind]
    check("sum", terms, list(zeros[: len(terms)]), multipliers, offset, None, *out)


def test_sums_that_float32_cannot_hold_are_refused() -> None:
    x = levels((4, 4), torch.uint8, "any", 0)
    huge = [number(3e5), number(-3e5)]
    assert kernels_of("sum", [x, x], [0, 1], huge, None, None, 0, 0, 255, torch.uint8)[0] == []
    accumulator = torch.ones(4, 4, dtype=torch.int32)
    args = ([x, accumulator], [0, 0], [number(1), number(1)], None, None, 0, 0, 255, torch.uint8)
    assert kernels_of("sum", *args)[0] == []


@settings(max_examples=60)
@given(
    shape=shapes, kind=st.sampled_from(["alike", "gate", "mixed"]), out=st.one_of(grids(), st.just(FLOAT)), seed=seeds,
    scale=st.floats(1e-5, 1.0), zeros=st.tuples(zero_points, zero_points),
)  # fmt: skip
def test_products_of_elements(shape: Any, kind: str, out: Any, scale: float, zeros: Any, seed: int) -> None:
    x = levels(shape, torch.uint8, "any", seed)
    y = levels(shape, torch.int8 if kind == "mixed" else torch.uint8, "any", seed + 1)
    if kind == "gate" and len(shape) > 2:
        y = y.flatten(2)[:, :, :1].reshape(*shape[:2], *[1] * (len(shape) - 2)).contiguous()
    pair = [x, zeros[0], y, zeros[1]] if seed % 2 else [y, zeros[1], x, zeros[0]]
    check("mul", *pair, number(scale), None, *out)


@settings(max_examples=50)
@given(shape=shapes, dtype=dtypes, out=st.one_of(grids(), st.just(FLOAT)), scale=scales, zero=zero_points, seed=seeds)
def test_other_grids(shape: Any, dtype: Any, out: Any, scale: float, zero: int, seed: int) -> None:
    sign = -1 if seed % 2 else 1
    check("requantize", levels(shape, dtype, "any", seed), zero, number(sign * scale), None, *out)


# -- sums and averages -------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(shape=shapes, keepdim=st.booleans(), out=st.one_of(grids(), st.just(FLOAT)), dtype=dtypes, zero=zero_points,
       scale=scales, picked=st.sets(st.integers(0, 4), min_size=1), seed=seeds, fill=st.sampled_from(FILLS))  # fmt: skip
def test_sums_over_axes(
    shape: Any, keepdim: bool, out: Any, dtype: Any, zero: int, scale: float, picked: Any, seed: int, fill: str
) -> None:
    shape = tuple(max(size, 1) for size in shape)
    dims = sorted({dim % len(shape) for dim in picked})
    count = math.prod(shape[dim] for dim in dims)
    x = levels(shape, dtype, fill, seed)
    check("sum_over", x, zero, dims, keepdim, number(scale / count), None, *out)


@st.composite
def pools(draw: Any, min_rank: int = 1) -> tuple[Any, ...]:
    rank = draw(st.integers(min_rank, 3))
    sizes = tuple(draw(st.integers(3, 9)) for _ in range(rank))
    if draw(st.booleans()):
        sizes = (1, *sizes[1:])
    leading = draw(st.sampled_from([(2, 3), (1, 40), (1, 1), (3,)]))
    kernel = [draw(st.integers(1, min(3, size))) for size in sizes]
    stride = [draw(st.integers(1, 3)) for _ in range(rank)]
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    return (*leading, *sizes), kernel, stride, padding, draw(st.booleans()), draw(st.booleans())


@settings(max_examples=80)
@given(pool=pools(), out=st.one_of(grids(), st.just(FLOAT)), dtype=dtypes, zero=zero_points, scale=scales, seed=seeds)
def test_averages_of_windows(pool: Any, out: Any, dtype: Any, zero: int, scale: float, seed: int) -> None:
    shape, kernel, stride, padding, ceil, count_padding = pool
    sizes = shape[-len(kernel) :]
    rows = zip(sizes, kernel, stride, padding, strict=True)
    axes = [windows_along(*row, ceil, count_padding) for row in rows]
    edges = [edge for axis in axes for edge in (axis.before, axis.after)]
    counts = torch.ones((), dtype=torch.float64)
    for axis in axes:
        counts = counts.unsqueeze(-1) * torch.tensor(axis.counts)
    multiplier = scale / (counts.flatten()[0] if counts.numel() == 1 else counts)
    check("sum_windows", levels(shape, dtype, "any", seed), zero, kernel, stride, edges, multiplier, None, *out)


@settings(max_examples=50)
@given(
    leading=st.sampled_from([(2, 3), (1, 40), (1, 1)]), sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(2, 5)),
    min_size=1, max_size=3), out=st.one_of(grids(), st.just(FLOAT)), zero=zero_points, scale=scales, seed=seeds,
)  # fmt: skip
def test_averages_of_spans(leading: Any, sizes: Any, out: Any, zero: int, scale: float, seed: int) -> None:
    spans = [[(n * size // out, -(-(n + 1) * size // out)) for n in range(out)] for size, out in sizes]
    starts, ends = ([torch.tensor([span[at] for span in axis]) for axis in spans] for at in (0, 1))
    counts = torch.ones((), dtype=torch.float64)
    for start, end in zip(starts, ends, strict=True):
        counts = counts.unsqueeze(-1) * (end - start)
    x = levels((*leading, *(size for size, _ in sizes)), torch.uint8, "any", seed)
    check("sum_spans", x, zero, starts, ends, scale / counts, None, *out)


def test_spans_that_are_no_adaptive_pool_are_refused() -> None:
    x = levels((1, 2, 8), torch.uint8, "any", 0)
    starts, ends = [torch.tensor([0, 1])], [torch.tensor([4, 8])]
    grid = (0, 0, 255, torch.uint8)
    assert kernels_of("sum_spans", x, 0, starts, ends, torch.tensor([0.25, 1 / 7]).double(), None, *grid)[0] == []


# -- the largest, and larger images ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(pool=pools(min_rank=2), dtype=dtypes, dilation=st.integers(1, 2), seed=seeds)
def test_largest_of_windows(pool: Any, dtype: Any, dilation: int, seed: int) -> None:
    shape, kernel, stride, padding, ceil, _ = pool
    rank = len(kernel)
    if any((k - 1) * dilation >= size for k, size in zip(kernel, shape[-rank:], strict=True)):
        dilation = 1
    x = levels(shape, dtype, "any", seed)
    (kernel_, inputs), *_ = kernels_of(f"max_pool{rank}d", x, kernel, stride, padding, [dilation] * rank, ceil)[0]
    pool_of_floats: Any = (functional.max_pool2d, functional.max_pool3d)[rank - 2]
    expected = pool_of_floats(x.double(), kernel, stride, padding, dilation, ceil)
    lowest = torch.iinfo(dtype).min
    expected = expected.clamp(min=lowest)  # windows that are all padding
    for lay in (lambda x: x, lying_channels_last, strided, by_odd_strides, by_odd_strides_last):
        for in_order in (True, False):
            kernel_.in_order = in_order
            assert torch.equal(kernel_(lay(inputs[0])).double(), expected)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 40, 3, 3), (1, 1, 1, 1), (1, 40, 2, 3, 4)])
def test_larger_images(shape: tuple[int, ...]) -> None:
    x = levels(shape, torch.uint8, "any", 0)
    axes = len(shape) - 2
    assert check(f"upsample_nearest{axes}d", x, None, [2.0] * axes) == ["upsample_nearest, channels last"]


# -- norms and softmax ---------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    kind=st.sampled_from(["layer", "layer of one number", "group", "instance", "instance of one number", "rms"]),
    fill=st.sampled_from(FILLS), dtype=dtypes, zero=zero_points, x_scale=st.floats(1e-3, 1.0), out=grids(), seed=seeds,
    step=st.floats(0.005, 0.1), with_offset=st.booleans(),
)  # fmt: skip
def test_norms(
    kind: str, fill: str, dtype: Any, zero: int, x_scale: float, out: Any, seed: int, step: float, with_offset: bool
) -> None:
    shape = (2, 5, 24) if kind.startswith(("layer", "rms")) else (2, 8, 4, 3)
    length = {"layer": 24, "rms": 24, "group": 48, "instance": 12}[kind.partition(" ")[0]]
    numbers = () if "one number" in kind else (24,) if kind in ("layer", "rms") else (8, 1, 1)
    gamma = (torch.rand(numbers, dtype=torch.float64) + 0.2) / step
    offset = torch.randn(numbers, dtype=torch.float64) / step if with_offset else None
    eps = eps_of(length, 255, 1e-5, x_scale)
    assert eps is not None
    multiplier = gamma * 2.0 ** -reciprocal_places(length)
    x = levels(shape, dtype, fill, seed)
    head = (x, zero, length, kind != "rms", eps.value, eps.places)
    steepest = float(gamma.max()) * x_scale / math.sqrt(1e-5) * 255 * 2.0**-23
    check("normalize", *head, multiplier, offset, None, *out, least=0 if steepest > 0.2 else 1)


def test_norms_of_groups_that_are_nearly_alike() -> None:
    """In any order in memory: where channels lie side by side, torch's own norm is 8 steps off."""
    x = torch.full((2, 8, 4, 3), 186, dtype=torch.uint8)
    x[0, 0, 3, 1] = 187
    eps = eps_of(48, 255, 1e-5, 1.0)
    assert eps is not None
    multiplier = torch.full((8, 1, 1), 19.0).double() * 2.0 ** -reciprocal_places(48)
    check("normalize", x, 0, 48, True, eps.value, eps.places, multiplier, None, None, 0, 0, 255, torch.uint8)


def test_norms_of_rows_that_are_all_alike_are_refused_where_float32_would_not_do() -> None:
    """A scale so large that eps comes to nothing beside it."""
    x = levels((4, 16), torch.uint8, "alike", 0)
    eps = eps_of(16, 255, 1e-5, 100.0)
    assert eps is not None
    multiplier = torch.full((16,), 50.0).double() * 2.0 ** -reciprocal_places(16)
    head = (x, 0, 16, True, eps.value, eps.places)
    assert kernels_of("normalize", *head, multiplier, None, None, 0, 0, 255, torch.uint8)[0] == []


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(3, 7), (2, 4, 9), (1, 3, 5, 33), (1, 1), (2, 300)]), dim=st.integers(0, 3), fill=st.sampled_from(
    FILLS), dtype=dtypes, x_scale=st.floats(1e-4, 60.0), step=st.sampled_from([1 / 256, 1 / 128, 1 / 300, 0.003]),
    seed=seeds,
)  # fmt: skip
def test_softmax(shape: Any, dim: int, fill: str, dtype: Any, x_scale: float, step: float, seed: int) -> None:
    from quantc.integer.grid import Grid

    dim %= len(shape)
    grid = Grid(number(x_scale), torch.tensor(0), 0, 255, dtype)
    is_power = math.log2(1 / step).is_integer()
    table = powers_of(grid, shape[dim], 9 if is_power else 0)
    ending = (torch.tensor(round(2 / step)), torch.tensor(1)) if is_power else (number(1 / step), None)
    lowest = torch.iinfo(dtype).min
    check("softmax", levels(shape, dtype, fill, seed), table, dim, *ending, lowest, lowest, lowest + 255, dtype)


# -- tables ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    columns=st.sampled_from([1, 3, 8, 24]), kind=st.sampled_from(["rows", "whole", "groups"]), affine=st.booleans(),
    shape=st.sampled_from([(), (1,), (5,), (2, 3), (0,), (2, 0)]), dtype=dtypes, index=st.sampled_from(
    [torch.int64, torch.int32]), seed=seeds,
)  # fmt: skip
def test_rows_of_tables_are_those_of_the_op_bit_for_bit(
    columns: int, kind: str, affine: bool, shape: Any, dtype: Any, index: Any, seed: int
) -> None:
    w = levels((11, columns), dtype, "any", seed)
    groups = 2 if kind == "groups" and columns % 2 == 0 else 1
    sizes: tuple[int, ...] = {"rows": (11,), "whole": (), "groups": (11, groups)}[kind]
    scale = torch.rand(sizes) + 0.01
    zeros = torch.randint(-8, 9, sizes).to(torch.int32) if affine else None
    axis, group = {"rows": (0, None), "whole": (None, None), "groups": (None, columns // groups)}[kind]
    indices = torch.randint(0, 11, shape).to(index)
    sketch = Sketch()
    nodes = [None if part is None else sketch.constant("c", part) for part in (w, scale, zeros)]
    target = torch.ops.quantc.embedding_weight_only.default
    node = sketch.call(target, (*nodes, axis, group, sketch.input("i", indices)))
    call = Call(sketch.program(node), node)
    made = [maker(call) for maker in kernels_for("x86")["embedding_weight_only"]]
    names = [item.kernel.name for item in made if isinstance(item, Placement)]
    assert names[0] == "fbgemm rows of bytes"
    for item in made:
        kernel = item.kernel if isinstance(item, Placement) else item
        assert torch.equal(kernel(indices), sketch.values[node])
        assert all(torch.equal(tensor, w) for tensor in kernel.unpack(kernel._packed).values())


@settings(max_examples=40)
@given(
    kind=st.sampled_from([("sum", False), ("sum", True), ("mean", False)]), last=st.booleans(), seed=seeds,
    cuts=st.lists(st.integers(0, 30), max_size=6),
)  # fmt: skip
def test_bags_of_rows(kind: tuple[str, bool], last: bool, seed: int, cuts: list[int]) -> None:
    mode, weighted = kind
    torch.manual_seed(seed)
    w, scale = levels((40, 12), torch.int8, "any", seed), torch.rand(40) + 0.01
    indices = torch.randint(0, 40, (30,))
    offsets = torch.tensor([0, *sorted(cuts), *([30] if last else [])])
    weights = torch.randn(30) if weighted else None
    sketch = Sketch()
    stored = [sketch.constant("c", part) for part in (w, scale)]
    given_ = [None if part is None else sketch.input("i", part) for part in (indices, offsets, weights)]
    target = torch.ops.quantc.embedding_bag_weight_only.default
    rest = (0 if mode == "sum" else 1, given_[2], last, None)
    node = sketch.call(target, (*stored, None, 0, None, given_[0], given_[1], *rest))
    call = Call(sketch.program(node), node)
    made = kernels_for("x86")["embedding_bag_weight_only"][0](call)
    assert isinstance(made, Placement)
    expected = functional.embedding_bag(
        indices, w.float() * scale[:, None], offsets, mode=mode, per_sample_weights=weights, include_last_offset=last
    )
    found = made.kernel(*(sketch.values[item] for item in made.inputs))
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= CLOSE * float(expected.abs().max().clamp(min=1))


# -- NaN ---------------------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """A product of what comes in, and one of what is computed of it in float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x.flatten(1)).sqrt().nan_to_num(0.5))
        return made


def _quantized() -> qc.Program:
    torch.manual_seed(0)
    x = torch.randn(4, 2, 4)
    prepared = qc.prepare(qc.capture(Halves().eval(), (x,)), "x86")
    qc.calibrate(prepared, [(x,)])
    return qc.convert(prepared, reduce_range="weights")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_comes_in_and_is_no_number_is_an_error(value: float) -> None:
    program = _quantized()
    module = qc.lower(program, "x86")
    x = torch.randn(4, 2, 4)
    expected, broken = module(x), x.clone()
    broken[1, 1, 2] = value
    for _ in range(4):  # the last of them from a recording
        assert torch.equal(module(x), expected)
        given = broken.clone()
        for form in (program, module.program, module):
            with pytest.raises(InputError, match=f"input 'x' holds {'NaN' if math.isnan(value) else 'infinity'}"):
                form(given)
    # the graphs themselves follow torch's op, which has level 0 for NaN, silently
    assert bool(program.module(broken).isfinite().all())
    broken[0, 0, 0], broken[0, 0, 1] = math.inf, -math.inf  # their sum is NaN, and none of them is
    with pytest.raises(InputError, match="input 'x' holds"):
        module(broken)
    large = torch.full_like(x, 3e38)  # the sum is infinite, and none of them is
    assert bool(module(large).isfinite().all())


@pytest.mark.parametrize("dtype", BYTES)
def test_what_quantizing_makes_of_what_is_no_number(dtype: torch.dtype) -> None:
    """What the docs say of the three forms."""
    info = torch.iinfo(dtype)
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 1.0]).repeat(7)
    grid = (0.1, 3, info.min, info.max, dtype)
    written = decomposed_ops().quantize_per_tensor.default(x, *grid).view(7, 6)
    made = QuantizeKernel(*grid)(x).view(7, 6)
    assert bool((written == written[0]).all())
    assert bool((made == made[0]).all())
    assert written[0].tolist() == [0, info.max, info.min, info.max, info.min, 13]
    assert made[0].tolist() == [info.max, info.max, info.min, info.max, info.min, 13]
