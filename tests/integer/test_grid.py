"""Grids: the real numbers that integers stand for, read from the ops that quantize and dequantize."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import fx

from quantc.integer.grid import Grid, grid_of
from quantc.ir.program import Program
from tests.support.by_hand import aten
from tests.support.qdq_by_hand import BYTES, SIGNED, QdqBuilder, drawn, integers


def grid(scale: float = 0.5, zero_point: int = 3) -> Grid:
    return Grid(torch.tensor(scale).double(), torch.tensor(zero_point), 0, 255, torch.uint8)


def read(program: Program, node: fx.Node) -> Grid:
    found = grid_of(program, node)
    assert found is not None
    return found


def test_one_scale_is_read_as_the_float32_it_is_used_as() -> None:
    build = QdqBuilder()
    levels = build.quantize(build.input("x", drawn(2, 3)), 0.1, 7)
    real = build.dequantize(levels, 0.1, 7)
    program = build.done(real)
    for node in (levels, real):
        found = read(program, node)
        assert found.one_scale == float(np.float32(0.1)) != 0.1
        assert (found.one_zero_point, found.qmin, found.qmax, found.dtype) == (7, *BYTES)
        assert found.is_whole


def test_scales_of_channels_and_groups_are_read_from_constants() -> None:
    build = QdqBuilder()
    scales, zeros = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([0, 4, -1])
    by_channel = build.by_channel("w", integers(2, 3), scales, axis=1, zeros=zeros)
    by_group = build.by_group("v", integers(2, 6), torch.tensor([[0.5, 1.0], [2.0, 4.0]]), 3)
    program = build.done(by_channel, by_group)
    found = read(program, by_channel)
    assert (found.axis, found.group, found.is_whole) == (1, None, False)
    assert found.scale.tolist() == [0.5, 0.25, 2.0]
    assert found.zero_point.tolist() == [0, 4, -1]
    grouped = read(program, by_group)
    assert (grouped.axis, grouped.group, grouped.qmin) == (1, 3, SIGNED[0])
    assert grouped.scale.tolist() == [[0.5, 1.0], [2.0, 4.0]]


def test_no_zero_points_are_zeros() -> None:
    build = QdqBuilder()
    node = build.by_channel("w", integers(2, 3), torch.tensor([0.5, 0.25]))
    node.args = (*node.args[:2], None, *node.args[3:])
    assert read(build.done(node), node).zero_point.tolist() == [0, 0]


def test_a_grid_that_is_found_as_the_program_runs_is_not_known() -> None:
    build = QdqBuilder()
    x = build.input("x", drawn(2, 3))
    come, other = build.run_time(x), build.call(aten.relu.default, x)
    program = build.done(come, other)
    assert grid_of(program, come) is None
    assert grid_of(program, other) is None


@pytest.mark.parametrize(
    ("real", "level"),
    [(0.0, 3), (0.25, 3), (0.75, 5), (-0.5, 2), (-100.0, 0), (1e9, 255), (1.0, 5), (-float("inf"), 0)],
)
def test_the_level_of_a_number_is_the_nearest_with_ties_to_even_steps(real: float, level: int) -> None:
    assert grid().level(real) == level


def test_grids_are_equal_if_nothing_about_them_differs() -> None:
    one = grid()
    assert one.equals(grid())
    others = [grid(0.25), grid(0.5, 4), replace(one, qmin=1), replace(one, qmax=254), replace(one, dtype=torch.int16)]
    others += [replace(one, axis=0), replace(one, group=2), replace(one, scale=one.scale.reshape(1))]
    assert not any(one.equals(other) or other.equals(one) for other in others)
