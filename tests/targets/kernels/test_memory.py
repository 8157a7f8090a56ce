"""Memory of a lowered module's weights: plain, packed, and in the float model."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.memory import Memory, memory_of
from tests.support.by_hand import two_layers
from tests.support.stored_weights import needs_fbgemm

IN_FLOAT = 4 * (8 * 4 + 8 + 3 * 8 + 3)
"""Bytes of the two layers."""


class Holding(Kernel):
    name: ClassVar[str] = "holding"

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def pack(self) -> Any:
        return None

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return packed


def measured(*kernels: Kernel) -> Memory:
    return memory_of(two_layers(), nn.ModuleList(kernels))


def test_the_weights_of_the_program_are_counted_in_float() -> None:
    found = measured()
    assert found == Memory(plain=IN_FLOAT, packed=0, in_float=IN_FLOAT)
    assert found.share == 1.0


def test_a_tensor_that_several_hold_is_counted_once() -> None:
    shared = torch.zeros(100, dtype=torch.int8)
    found = measured(Holding(weight=shared), Holding(weight=shared), Holding(weight=shared[10:]))
    assert found.plain == IN_FLOAT + 100


def test_released_weights_take_nothing() -> None:
    assert measured(Holding(weight=torch.zeros(100, device="meta"), other=torch.zeros(0))).plain == IN_FLOAT


def test_packed_tensors_count_wherever_they_are_and_once() -> None:
    kernel = Holding(weight=torch.zeros(10, dtype=torch.int8))
    packed = torch.zeros(6)
    kernel._packed = (
        packed,
        {"more": [torch.zeros(3, dtype=torch.int16), packed]},
        kernel.get_buffer("weight"),
        3,
        None,
    )
    found = measured(kernel)
    assert (found.plain, found.packed) == (IN_FLOAT + 10, 24 + 6)
    assert found.held == IN_FLOAT + 40


@needs_fbgemm
def test_a_packed_weight_that_torch_hides_is_taken_for_as_large_as_the_plain_one() -> None:
    levels = torch.zeros(5, 4, dtype=torch.int8)
    torch.backends.quantized.engine = "fbgemm"
    weight = torch._make_per_tensor_quantized_tensor(levels, 1.0, 0)  # pyright: ignore[reportPrivateImportUsage]
    kernel = Holding(weight=levels, multiplier=torch.ones(5))
    kernel._packed = (torch.ops.quantized.linear_prepack(weight, None),)
    assert measured(kernel).packed == 20


def test_scales_and_zero_points_are_no_weights_of_the_float_model() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    lowered = qc.lower(qc.quantize(nn.Linear(16, 8).eval(), (x,), mode="dynamic").program, "x86")
    before = lowered.memory()
    assert before.in_float == 4 * (16 * 8 + 8)
    assert before.packed == 0
    assert before.plain >= 16 * 8
    lowered(x)
    after = lowered.memory()
    assert after.in_float == before.in_float
    assert after.packed >= 16 * 8
    assert after.plain < before.plain


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (Memory(500, 1500, 8000), "weights: 2.0 kB (1.5 kB of it packed), 0.25 of float"),
        (Memory(0, 3_000_000, 6_000_000), "weights: 3.0 MB (3.0 MB of it packed), 0.50 of float"),
        (Memory(0, 0, 0), "weights: 0.0 kB (0.0 kB of it packed)"),
    ],
)
def test_it_is_told_in_a_line(memory: Memory, text: str) -> None:
    assert str(memory) == text


def test_without_weights_nothing_is_saved() -> None:
    assert Memory(0, 0, 0).share == 1.0
    assert Memory(1, 2, 3).to_data() == {"plain": 1, "packed": 2, "in_float": 3}
