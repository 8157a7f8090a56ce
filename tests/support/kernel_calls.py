"""Calls of single ops on bytes, the kernels that are offered for them, and what these are held to."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.node import map_aggregate

from quantc.integer.semantics import load
from quantc.targets.kernels.int8_elementwise import BYTES
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


def call_of(op: str, *args: Any) -> tuple[Call, Sketch]:
    """A call of an op: bytes are its inputs, and other tensors constants."""
    sketch = Sketch()
    target: Any = getattr(torch.ops.quantc, op, None) or getattr(torch.ops.aten, op)
    target = getattr(target, "vec", None) or target.default if op not in dir(torch.ops.quantc) else target.default

    def node_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return sketch.input("x", value) if value.dtype in BYTES else sketch.constant("c", value)

    node = sketch.call(target, map_aggregate(args, node_of))
    return Call(sketch.program(node), node), sketch


def kernels_of(op: str, *args: Any) -> tuple[list[tuple[Kernel, list[Tensor]]], Any]:
    """The kernels that are offered for a call, with what each is to be given; and what the op itself yields."""
    call, sketch = call_of(op, *args)
    found: list[tuple[Kernel, list[Tensor]]] = []
    for maker in kernels_for("x86")[call.op]:
        try:
            made = maker(call)
        except NoKernelError:
            continue
        placement = made if isinstance(made, Placement) else Placement(made, call.inputs)
        found.append((placement.kernel, [sketch.values[item] for item in placement.inputs]))
    return found, sketch.values[call.node]


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
