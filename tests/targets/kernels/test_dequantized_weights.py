"""Int8 weights of float ops, dequantized once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels.dequantized_weights import RealWeight, made_once
from quantc.targets.kernels.kernel_table import Call, NoKernelError
from quantc.testing.synthesis import Sketch

LEVELS = torch.tensor([[-128, 0, 127], [1, 2, 3]], dtype=torch.int8)
GRID = (-128, 127, torch.int8)


@pytest.mark.parametrize(
    ("axis", "scales", "zeros", "expected"),
    [
        (0, [0.5, 2.0], None, [[-64.0, 0.0, 63.5], [2.0, 4.0, 6.0]]),
        (0, [0.5, 2.0], [2, -1], [[-65.0, -1.0, 62.5], [4.0, 6.0, 8.0]]),
        (1, [1.0, 0.5, 0.25], [0, 0, 3], [[-128.0, 0.0, 31.0], [1.0, 1.0, 0.0]]),
        (-1, [1.0, 0.5, 0.25], None, [[-128.0, 0.0, 31.75], [1.0, 1.0, 0.75]]),
    ],
)
def test_the_float_weight_is_made_once_and_gives_its_levels_back(
    axis: int, scales: list[float], zeros: list[int] | None, expected: list[list[float]]
) -> None:
    kernel = RealWeight(LEVELS, torch.tensor(scales), None if zeros is None else torch.tensor(zeros), axis, *GRID)
    found = kernel()
    assert found.tolist() == expected
    assert kernel() is found
    assert torch.equal(kernel.unpack(kernel._packed)["levels"], LEVELS)


def test_levels_come_back_whatever_the_scales() -> None:
    torch.manual_seed(0)
    levels = torch.arange(-128, 128, dtype=torch.int8).repeat(64, 1)
    scales, zeros = torch.rand(64) * 10.0 ** torch.randint(-20, 20, (64,)), torch.randint(-128, 128, (64,))
    kernel = RealWeight(levels, scales, zeros, 0, *GRID)
    kernel()
    assert torch.equal(kernel.unpack(kernel._packed)["levels"], levels)


def call(computed: str = "", **options: Any) -> Call:
    sketch = Sketch()
    tensors: dict[str, Tensor] = {"levels": LEVELS, "scales": torch.ones(2), "zeros": torch.zeros(2, dtype=torch.int64)}
    nodes = [(sketch.input if name == computed else sketch.constant)(name, value) for name, value in tensors.items()]
    node = sketch.call(decomposed_ops().dequantize_per_channel.default, (*nodes, 0, *GRID), options)
    return Call(sketch.program(node), node)


def test_constants_are_taken() -> None:
    made = made_once(call())
    assert cast("Tensor", made()).tolist() == LEVELS.float().tolist()
    assert set(made.state_dict()) == {"levels", "scales", "zero_points"}


@pytest.mark.parametrize("computed", ["levels", "scales", "zeros"])
def test_what_is_computed_is_left_to_its_op(computed: str) -> None:
    with pytest.raises(NoKernelError, match="computed"):
        made_once(call(computed))


def test_other_floats_than_float32_are_left_to_their_op() -> None:
    with pytest.raises(NoKernelError, match="not brought back to float32"):
        made_once(call(out_dtype=torch.float16))
