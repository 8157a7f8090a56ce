"""Rows of quantized embedding tables, and bags of them: looked up as stored, and only those rows dequantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from quantc.targets.kernels.embedding import (
    BagLookup,
    ByteLookup,
    ByteTable,
    EmbeddingLookup,
    Table,
    bag_lookup,
    byte_bag_lookup,
)
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernels_for
from quantc.targets.kernels.stored_weight import StoredWeight
from quantc.testing.synthesis import Sketch
from tests.support.kernel_calls import CLOSE, dtypes, levels, seeds


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


# -- the tables themselves -------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[-128, 0, 127, 5], [1, 2, 3, 4], [9, -9, 8, -8]], dtype=torch.int8)
SCALES = torch.tensor([0.5, 2.0, 0.25])


def stored(**parts: Any) -> StoredWeight:
    usual: dict[str, Any] = {"w": ROWS, "scale": SCALES, "zero_point": None, "axis": 0, "group_size": None}
    return StoredWeight(**(usual | parts))


WEIGHTS: dict[str, tuple[StoredWeight, Tensor]] = {
    "rows": (stored(), ROWS * SCALES[:, None]),
    "affine": (stored(zero_point=torch.tensor([1, -1, 3])), (ROWS - torch.tensor([[1], [-1], [3]])) * SCALES[:, None]),
    "whole": (stored(scale=torch.tensor(0.5), axis=None), ROWS * 0.5),
    "groups": (
        stored(scale=torch.tensor([[1.0, 2.0]] * 3), axis=None, group_size=2),
        ROWS * torch.tensor([1.0, 1.0, 2.0, 2.0]),
    ),
    "uint8": (stored(w=ROWS.view(torch.uint8)), ROWS.view(torch.uint8) * SCALES[:, None]),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("indices", [torch.tensor([2, 0, 2]), torch.tensor([[1], [0]]), torch.tensor(1)], ids=str)
def test_rows_are_the_numbers_they_stand_for(name: str, indices: Tensor) -> None:
    weight, real = WEIGHTS[name]
    expected = functional.embedding(indices, real)
    assert torch.equal(Table.of(weight).look_up(indices), expected)
    found = ByteTable.of(weight)
    assert torch.equal(found.look_up(indices), expected)
    assert torch.equal(found.stored(weight.w.dtype), weight.w)


def test_columns_with_scales_of_their_own_are_looked_up_whole() -> None:
    scale = torch.tensor([1.0, 2.0, 0.5, 4.0])
    found = Table.of(stored(scale=scale, axis=1)).look_up(torch.tensor([1]))
    assert found.tolist() == [[1.0, 4.0, 1.5, 16.0]]


def test_offsets_that_float32_does_not_hold_are_applied_afterwards() -> None:
    scale = torch.full((3,), 1 / 3)
    weight = stored(scale=scale, zero_point=torch.tensor([77, 77, 77]))
    table = ByteTable.of(weight)
    assert table.scale is not None
    assert torch.equal(table.look_up(torch.arange(3)), (ROWS.int() - 77).float() * scale[:, None])
    assert ByteTable.of(stored()).scale is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_fewer_bits_are_looked_up_exactly(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.25, -1.5], [3.0, 0.5]]).to(dtype)
    found = Table.of(StoredWeight(rows, None, None, None, None)).look_up(torch.tensor([1, 0]))
    assert found.tolist() == [[3.0, 0.5], [0.25, -1.5]]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_a_row_that_is_left_out(mode: str) -> None:
    indices, offsets = torch.tensor([0, 1, 2, 1, 1, 0]), torch.tensor([0, 3, 5])
    real = WEIGHTS["rows"][1]
    expected = functional.embedding_bag(indices, real, offsets, mode=mode, padding_idx=1)
    kernel = BagLookup(stored(), {"sum": 0, "mean": 1, "max": 2}[mode], False, -2)
    torch.testing.assert_close(kernel(indices, offsets), expected)


def test_an_index_beyond_the_table_is_an_error() -> None:
    for kernel in (ByteLookup(stored()), EmbeddingLookup(stored())):
        with pytest.raises((RuntimeError, IndexError)):
            kernel(torch.tensor([3]))


def bag(weight: StoredWeight, mode: int = 0, padding: int | None = None) -> Call:
    sketch = Sketch()
    parts = (weight.w, weight.scale, weight.zero_point)
    nodes = [None if part is None else sketch.constant("c", part) for part in parts]
    given_ = [sketch.input("i", part) for part in (torch.tensor([0, 1]), torch.tensor([0, 1]))]
    target = torch.ops.quantc.embedding_bag_weight_only.default
    node = sketch.call(target, (*nodes, weight.axis, weight.group_size, *given_, mode, None, False, padding))
    return Call(sketch.program(node), node)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: bag(stored(), mode=2), "adds up all rows"),
        (lambda: bag(stored(), padding=1), "adds up all rows"),
        (lambda: bag(WEIGHTS["groups"][0]), "in groups"),
        (lambda: bag(stored(scale=torch.ones(4), axis=1)), "not for each column"),
        (lambda: bag(StoredWeight(torch.ones(3, 4).half(), None, None, None, None)), "rows of bytes"),
    ],
    ids=["largest", "padding", "groups", "columns", "floats"],
)
def test_bags_that_fbgemm_does_not_sum_are_refused(call: Callable[[], Call], reason: str) -> None:
    with pytest.raises(NoKernelError, match=reason):
        byte_bag_lookup(call())
    assert isinstance(bag_lookup(call()).kernel, BagLookup)
