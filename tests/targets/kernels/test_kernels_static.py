"""Kernels of static programs against the ops of the integer form they stand for, given the same inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError
from quantc.targets.kernels.int8_conv import ConvSum
from quantc.targets.kernels.kernel_agreement import KernelGap, kernel_agreement

CLOSE = 2e-6
"""How far floats may be off, relative to the largest: kernels sum in float32 what the integer form has in float64."""


class Residual(nn.Module):
    """A block whose sum is taken into the convolution, one whose summand is read again, and one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.first, self.second, self.third = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        x = F.relu(self.first(x) + x)
        y = F.relu(self.second(x) + x)
        z = self.third(y) + x
        return self.head(F.adaptive_avg_pool2d(z, 1).flatten(1))


def lowered(model: nn.Module, *inputs: Tensor, backend: str = "x86", **options: Any) -> qc.Lowered:
    prepared = qc.prepare(qc.capture(model.eval(), inputs, **options), backend)
    qc.calibrate(prepared, [inputs])
    return qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")


def gaps(module: qc.Lowered, *inputs: Tensor) -> tuple[KernelGap, ...]:
    found = kernel_agreement(module, *inputs)
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in found), "\n".join(map(str, found))
    return found


@settings(max_examples=12)
@given(
    axes=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    after=st.sampled_from([nn.Identity, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU]),
    seed=st.integers(0, 9),
)
def test_convolutions(
    axes: int, groups: int, kernel: int, stride: int, padding: int, dilation: int, bias: bool, after: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    first = make(4, 8, kernel, stride, padding, dilation, groups, bias)
    model = nn.Sequential(first, after(), make(8, 4, 1), nn.ReLU(), make(4, 4, 1))
    x = torch.randn(2, 4, *[9] * axes)
    module = lowered(model, x)
    found = gaps(module, x)
    is_usual = padding <= dilation * (kernel - 1) and not (axes == 3 and groups == 4)
    assert sum("qconv" in gap.kernel for gap in found) in ((3,) if is_usual else (2, 3))  # see Window.check_onednn


def test_a_sum_is_taken_into_the_convolution_and_what_is_read_again_is_kept() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 33, 33)
    model = Residual()
    module = lowered(model, x)
    found = gaps(module, x)
    assert [gap.kernel for gap in found].count("onednn qconv + sum") >= 2
    program = module.program
    exact, fast = program(x), module(x)
    # as a whole: a few roundings apart, not a summand written over
    assert float((exact - fast).abs().max()) <= 0.02 * float(exact.abs().max())
    assert torch.equal(fast, module(x))


def test_attention() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    x = torch.randn(2, 20, 32)
    module = lowered(layer, x)
    gaps(module, x)
    assert not [row for row in module.placed if not row.kernel], module


@pytest.mark.parametrize("size", [1, 2, 7])
def test_other_batch_sizes_than_it_was_captured_with(size: int) -> None:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=64)
    x = torch.randn(4, 3, 33, 33)
    module = lowered(Residual(), x, dynamic_shapes=({0: batch},))
    other = torch.randn(size, 3, 33, 33)
    gaps(module, other)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_inputs_in_any_order_in_memory(order: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 5))
    x = torch.randn(2, 3, 9, 9)
    module = lowered(model, x)
    assert torch.equal(module(x), module(x.to(memory_format=order)))
    exact = module.program(x)
    assert float((module(x) - exact).abs().max()) <= 0.02 * float(exact.abs().max())


def test_copies_and_state_hold_plain_tensors() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 33, 33)
    module = lowered(Residual(), x)
    result = module(x)
    assert torch.equal(copy.deepcopy(module)(x), result)
    kinds = {tensor.dtype for tensor in module.state_dict().values()}
    assert kinds <= {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64}


# -- what is written over, and how results lie in memory -----------------------------------------------------------


class Convs(nn.Module):
    """Four convolutions, and what is done with them."""

    def __init__(self, forward: Callable[[list[nn.Conv2d], Tensor], Any]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.own = forward

    def forward(self, x: Tensor) -> Any:
        return self.own(list(self.convs), x)  # type: ignore[arg-type]


def moved_later(c: list[nn.Conv2d], x: Tensor) -> Any:
    """The sum that takes a convolution in stands after another that has written over what is convolved."""
    a = c[0](x).relu()
    b = c[1](a)
    s = (c[2](x) + a).relu()
    return c[3]((b + s).relu())


def seen_through_a_view(c: list[nn.Conv2d], x: Tensor) -> Any:
    a = c[0](x).relu()
    view = a[:, :, 1:]
    s = (c[1](x) + a).relu()
    return c[2](s), c[3](view)


def seen_turned(c: list[nn.Conv2d], x: Tensor) -> Any:
    a = c[0](x).relu()
    view = a.permute(0, 1, 3, 2)
    s = (c[1](x) + a).relu()
    return c[2](s), c[3](view)


def returned(c: list[nn.Conv2d], x: Tensor) -> Any:
    a = c[0](x).relu()
    return c[2]((c[1](x) + a).relu()), a


def in_strides(c: list[nn.Conv2d], x: Tensor) -> Any:
    return c[1](c[0](x).relu()).as_strided((2, 8, 12, 12), (1152, 144, 12, 1)) + 0


def bounded(c: list[nn.Conv2d], x: Tensor) -> Any:
    a = c[0](x).relu()
    return c[2]((c[1](a) + a).clamp(0.1, 0.5))


@pytest.mark.parametrize("reduce_range", ["weights", "activations"])
@pytest.mark.parametrize(
    "forward", [moved_later, seen_through_a_view, seen_turned, returned, in_strides, bounded], ids=lambda f: f.__name__
)
def test_a_whole_program_is_what_its_ops_are(forward: Any, reduce_range: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12, 12)
    prepared = qc.prepare(qc.capture(Convs(forward).eval(), (x,)), "x86")
    qc.calibrate(prepared, [x])
    program = qc.convert(prepared, reduce_range=reduce_range)
    module = qc.lower(program, "x86")
    for found, expected in zip(leaves(module(x)), leaves(module.program(x)), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 0.02
        assert found.stride() == expected.stride()


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def test_a_summand_nobody_reads_again_is_written_over() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 33, 33)
    module = lowered(Residual(), x)
    kept = [kernel.keep for kernel in module.modules() if isinstance(kernel, ConvSum)]
    assert kept == [True, True]  # what is convolved is added, and then it is read again
    chain = Convs(lambda c, x: c[3]((c[2](c[1](y := c[0](x).relu()).relu()) + y).relu()))
    module = lowered(chain, torch.randn(2, 8, 12, 12))
    assert [kernel.keep for kernel in module.modules() if isinstance(kernel, ConvSum)] == [False]


def test_vectors_and_pools_in_space() -> None:
    torch.manual_seed(0)
    vector = lowered(nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(9))
    assert vector(torch.randn(9)).shape == (4,)
    x = torch.randn(1, 2, 8, 8, 8)
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 3, 1))
    gaps(lowered(model, x), x)


def test_the_state_of_another_program_is_refused() -> None:
    torch.manual_seed(0)
    first, second = (lowered(nn.Linear(32, 16), torch.randn(4, 32)) for _ in range(2))
    first.load_state_dict(first.state_dict())
    with pytest.raises(InputError, match="another program"):
        first.load_state_dict(second.state_dict())
