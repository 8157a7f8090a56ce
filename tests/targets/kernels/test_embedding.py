"""Rows of quantized embedding tables, and bags of them: looked up as stored, and only those rows dequantized."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from quantc.targets.kernels.kernel_table import Call, Placement, kernels_for
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
