"""Weights as stored: levels, scales and zero points of a kernel, and the float weight they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantc.integer.semantics import load
from quantc.targets.kernels.kernel_table import Call, NoKernelError
from quantc.targets.kernels.stored_weight import StoredWeight, WeightOnly
from quantc.testing.synthesis import Sketch

load()
LEVELS = torch.tensor([[-4, 2, 6, 8], [1, 3, -5, 7], [0, -1, 2, 127]], dtype=torch.int8)
ROWS = torch.tensor([0.5, 2.0, 0.25])
ZEROS = torch.tensor([1, -1, 2])


def test_a_scale_and_a_zero_point_for_each_row() -> None:
    weight = StoredWeight(LEVELS, ROWS, ZEROS, 0, None)
    expected = [[-2.5, 0.5, 2.5, 3.5], [4.0, 8.0, -8.0, 16.0], [-0.5, -0.75, 0.0, 31.25]]
    assert weight.real().tolist() == expected
    assert weight.levels().tolist() == [[-5.0, 1.0, 5.0, 7.0], [2.0, 4.0, -4.0, 8.0], [-2.0, -3.0, 0.0, 125.0]]


def test_a_scale_for_each_group_of_a_row() -> None:
    scale = torch.tensor([[1.0, 10.0], [0.5, 2.0], [4.0, 0.25]])
    weight = StoredWeight(LEVELS, scale, None, None, 2)
    expected = [[-4.0, 2.0, 60.0, 80.0], [0.5, 1.5, -10.0, 14.0], [0.0, -4.0, 0.5, 31.75]]
    assert weight.real().tolist() == expected
    assert weight.row_scale is None


def test_floats_without_a_scale_are_what_they_are() -> None:
    half = torch.tensor([[0.1, -2.0]], dtype=torch.float16)
    found = StoredWeight(half, None, None, None, None).real()
    assert found.dtype is torch.float32
    assert torch.equal(found, half.float())


@pytest.mark.parametrize("stored", [torch.ones(3, 4), torch.ones(4, 3).t()], ids=["in order", "turned"])
def test_the_float_weight_is_new_memory_in_order(stored: Tensor) -> None:
    found = StoredWeight(stored, None, None, None, None).real()
    assert found.is_contiguous()
    found.zero_()
    assert bool(stored.any())


def test_rows_of_a_transposed_matrix_are_its_columns() -> None:
    weight = StoredWeight(LEVELS, torch.ones(4), None, 1, None, transposed=True)
    assert (weight.outputs, weight.inputs) == (4, 3)
    assert torch.equal(weight.rows(weight.real()), LEVELS.float().t())
    straight = StoredWeight(LEVELS, ROWS, None, 0, None)
    assert (straight.outputs, straight.inputs) == (3, 4)
    assert torch.equal(straight.rows(straight.levels()), LEVELS.float())


@pytest.mark.parametrize(
    ("scale", "axis", "transposed", "expected"),
    [
        (ROWS, 0, False, ROWS.tolist()),
        (torch.tensor(0.5), None, False, [0.5, 0.5, 0.5]),
        (torch.ones(4), 1, False, None),
        (torch.arange(4.0), 1, True, [0.0, 1.0, 2.0, 3.0]),
        (ROWS, 0, True, None),
        (None, None, False, None),
    ],
    ids=["rows", "whole", "columns", "outputs last", "inputs", "none"],
)
def test_the_scale_of_an_output_is_known_where_there_is_one(
    scale: Tensor | None, axis: int | None, transposed: bool, expected: list[float] | None
) -> None:
    found = StoredWeight(LEVELS, scale, None, axis, None, transposed=transposed).row_scale
    assert (None if found is None else found.tolist()) == expected


def test_weights_stored_in_another_shape_and_order_are_put_back() -> None:
    plain = torch.arange(24.0).reshape(2, 3, 4)
    stored = plain.permute(1, 0, 2).reshape(3, 8)
    weight = StoredWeight(stored, None, None, None, None, shape=[3, 2, 4], order=[1, 0, 2])
    assert torch.equal(weight.real(), plain)
    assert (weight.outputs, weight.inputs) == (2, 3)


def call(computed: bool) -> Call:
    sketch = Sketch()
    weight = sketch.input("w", LEVELS) if computed else sketch.constant("w", LEVELS)
    scale, indices = sketch.constant("s", ROWS), sketch.input("i", torch.tensor([0, 2]))
    node = sketch.call(torch.ops.quantc.embedding_weight_only.default, (weight, scale, None, 0, None, indices))
    return Call(sketch.program(node), node)


def test_it_is_read_from_a_call_whose_weight_is_a_constant() -> None:
    found = StoredWeight.of(call(computed=False))
    assert torch.equal(found.w, LEVELS)
    assert found.scale is not None
    assert torch.equal(found.scale, ROWS)
    assert (found.zero_point, found.axis, found.group_size, found.transposed) == (None, 0, None, False)
    with pytest.raises(NoKernelError, match="w is not a constant"):
        StoredWeight.of(call(computed=True))


class Holding(WeightOnly):
    name = "holding"

    def pack(self) -> Tensor:
        return self.stored.real()

    def run(self, packed: Tensor, *inputs: Tensor) -> Tensor:
        return inputs[0] @ packed.t()


def test_a_kernel_holds_its_weight_as_it_is_stored() -> None:
    kernel = Holding(StoredWeight(LEVELS, ROWS, None, 0, None))
    assert {name: value.dtype for name, value in kernel.state_dict().items()} == {
        "w": torch.int8,
        "scale": torch.float32,
    }
    assert torch.equal(kernel(torch.eye(4)).t(), LEVELS * ROWS[:, None])
    twin = Holding(StoredWeight(torch.zeros_like(LEVELS), torch.ones(3), None, 0, None))
    twin.load_state_dict(kernel.state_dict())
    assert torch.equal(twin(torch.eye(4)), kernel(torch.eye(4)))
