"""Float64 references of activations: each is its definition, and rises or falls on each of its pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import fx

from quantc.integer.grid import Grid
from quantc.integer.ops.lookup_tables import curve_levels
from quantc.ir.curves import Curve, compose, prelu
from quantc.ir.dialect import curve_of
from tests.support.curves import ONE, curve

aten = torch.ops.aten


@pytest.mark.parametrize("name", ONE)
def test_a_curve_is_its_definition_and_keeps_its_direction_on_each_piece(name: str) -> None:
    found, by_hand = curve(name), ONE[name][1]
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.linspace(-3, 1, 4001)]).double().sort().values
    y = found.function(x.reshape(1, -1)).reshape(-1)
    np.testing.assert_allclose(y.numpy(), [by_hand(item) for item in x.tolist()], rtol=1e-12, atol=1e-13)
    begin = -math.inf
    for piece in found.pieces:
        until = float(piece.until)
        here = y[(x > begin) & (x <= until)]
        change = here.diff() if piece.rises else -here.diff()
        assert bool((change >= -1e-15).all()), (name, piece)
        begin = max(begin, until)
    assert begin == math.inf


def test_a_function_with_options_that_make_no_sense_has_no_curve() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert curve_of(graph.call_function(aten.softplus.default, (x, 0.0))) is None
    assert curve_of(graph.call_function(aten.celu.default, (x, 0.0))) is None
    assert curve_of(graph.call_function(aten.erf.default, (x,))) is None


def test_levels_are_rounded_half_to_even_and_clamped() -> None:
    twice = Curve(lambda x: x * 2)
    out = Grid(torch.tensor(4.0).double(), torch.tensor(10), 0, 20, torch.uint8)
    x = torch.tensor([0.0, 1.0, 3.0, -1.0, 100.0, -100.0]).double()
    # 0, 0.5, 1.5, -0.5 steps, and beyond both ends
    assert curve_levels(twice, x, out).tolist() == [10, 10, 12, 10, 20, 0]


def test_curves_are_composed_in_order() -> None:
    function = compose([Curve(lambda x: x + 1), Curve(lambda x: x * 3)])
    assert function(torch.tensor([1.0, -1.0])).tolist() == [6.0, 0.0]
    assert compose([])(torch.tensor([2.0])).tolist() == [2.0]


def test_each_slope_is_a_row_that_falls_or_rises_below_zero() -> None:
    found = prelu(torch.tensor([0.5, -2.0]))
    assert found.rows == 2
    assert found.function(torch.tensor([[-4.0, 3.0]]).double()).tolist() == [[-2.0, 3.0], [8.0, 3.0]]
    falling = found.pieces[0]
    assert not falling.rises
    assert torch.as_tensor(falling.until).flatten().tolist() == [-math.inf, 0.0]


def test_a_clamp_to_computed_ends_has_no_curve() -> None:
    graph = fx.Graph()
    x, low = graph.placeholder("x"), graph.placeholder("low")
    assert curve_of(graph.call_function(aten.clamp.default, (x, low, 1.0))) is None
