"""Weights as quantc's own kernels read them, and back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.targets.kernels.native_packing import (
    BLOCK,
    LANES,
    Grouped,
    packed_bytes,
    packed_groups,
    unpacked_bytes,
    unpacked_groups,
    widths,
)
from tests.support.stored_weights import seeded


@given(st.integers(1, 300))
def test_blocks_hold_all_outputs_and_less_than_sixteen_more(outputs: int) -> None:
    held = sum(count * width for count, width in widths(outputs))
    assert outputs <= held < outputs + LANES
    assert all(width <= BLOCK and width % LANES == 0 for _, width in widths(outputs))


@given(st.integers(1, 150), st.integers(1, 40), st.integers(0, 2**20))
def test_bytes_come_back(outputs: int, inputs: int, seed: int) -> None:
    levels = torch.randint(-128, 128, (outputs, inputs), generator=seeded(seed)).to(torch.int8)
    assert torch.equal(unpacked_bytes(packed_bytes(levels), outputs, inputs), levels)


def test_an_input_has_all_outputs_of_a_block_side_by_side() -> None:
    levels = torch.arange(64, dtype=torch.int8).reshape(64, 1) + torch.tensor([[0, 1]], dtype=torch.int8)
    assert packed_bytes(levels).view(torch.int8).tolist() == [*range(64), *range(1, 65)]


@settings(max_examples=50)
@given(
    st.integers(1, 150),
    st.integers(1, 4),
    st.sampled_from([8, 16, 32, 64]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_groups_come_back(outputs: int, groups: int, size: int, has_zero: bool, is_short: bool, seed: int) -> None:
    generator = seeded(seed)
    levels = torch.randint(-8, 8, (outputs, groups * size), generator=generator).to(torch.int8)
    scale = torch.randint(1, 128, (outputs, groups), generator=generator) * (2.0**-9 if is_short else 0.1)
    zero = torch.randint(-8, 8, (outputs, groups), generator=generator) if has_zero else None
    weight = Grouped(levels, scale, zero)
    packed = packed_groups(weight)
    bits = 8 * len(packed) / sum(count * width for count, width in widths(outputs)) / (groups * size)
    assert bits == 4 + (8 * has_zero + (16 if weight.is_short else 32)) / size
    found = unpacked_groups(packed, outputs, groups * size, size, has_zero, weight.is_short)
    assert torch.equal(found[0], levels)
    assert torch.equal(found[1], scale)
    back = found[2]
    assert (back is None) == (zero is None)
    assert back is None or zero is None or torch.equal(back.long(), zero)
