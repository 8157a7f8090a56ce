"""The difference of two results of a program, and how much of it is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.pipeline.pipeline import Preserves
from quantc.pipeline.tolerance import Tolerance, distance, gap

EXACTLY, CLOSELY = Preserves.EXACTLY, Preserves.CLOSELY


numbers = st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=5)


@given(numbers)
def test_a_tensor_is_at_no_distance_from_itself(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert distance(tensor, tensor.clone()) == 0.0
    assert gap(tensor, tensor.clone(), EXACTLY, Tolerance()) is None


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2), min_size=1, max_size=5))
def test_distance_is_the_largest_difference(pairs: list[tuple[float, float]]) -> None:
    left, right = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    expected = max(abs(float(a) - float(b)) for a, b in zip(left, right, strict=True))
    assert distance(left, right) == expected


@pytest.mark.parametrize(
    ("left", "right", "size"),
    [
        (torch.tensor([nan]), torch.tensor([1.0]), inf),
        (torch.tensor([inf]), torch.tensor([-inf]), inf),
        (torch.tensor([inf, 1.0]), torch.tensor([inf, 1.5]), 0.5),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 1.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 1j]), 3.0),
    ],
)
def test_unusual_distances(left: torch.Tensor, right: torch.Tensor, size: float) -> None:
    assert distance(left, right) == size
    assert gap(left, right, EXACTLY, Tolerance()) is not None


def test_other_shapes_dtypes_and_kinds_are_gaps() -> None:
    one = torch.ones(2)
    assert str(gap(one, torch.ones(3), CLOSELY, Tolerance())) == "was f32[2], is f32[3]"
    assert str(gap(one, one.double(), CLOSELY, Tolerance())) == "was f32[2], is f64[2]"
    assert str(gap(one, None, CLOSELY, Tolerance())) == "was f32[2], is None"
    assert str(gap((one, 1), (one, 2), CLOSELY, Tolerance())) == "was int(1), is int(2)"
    assert gap([one, (3,)], [one.clone(), (3,)], EXACTLY, Tolerance()) is None
    assert gap(torch.tensor([5]), torch.tensor([6]), CLOSELY, Tolerance()) is not None


@dataclass
class Pair:
    u: Any
    v: Any


def test_objects_are_compared_part_by_part() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    assert gap(Pair(one, {"k": two}), Pair(one.clone(), {"k": two.clone()}), EXACTLY, Tolerance()) is None
    assert str(gap(Pair(one, two), Pair(one, one), EXACTLY, Tolerance())) == "differs by 1 (allowed: 0)"
    assert gap({"a": one}, {"b": one}, EXACTLY, Tolerance()) is not None
    hidden = SimpleNamespace(u=one), SimpleNamespace(u=one.clone())
    assert gap(*hidden, EXACTLY, Tolerance()) is not None  # their comparison raises


def test_what_is_allowed_grows_with_the_largest_number_and_the_coarseness_of_the_dtype() -> None:
    value = torch.tensor([0.5, -200.0, inf, nan])
    assert Tolerance(absolute=0.0).allowed(value, CLOSELY) == pytest.approx(
        0.02
    )  # 1e-4 of 200: infinity does not count
    assert Tolerance(absolute=0.25).allowed(value, CLOSELY) == pytest.approx(0.27)
    assert Tolerance(relative=0.5, absolute=0.0).allowed(value, CLOSELY) == 100.0
    by_dtype = [
        Tolerance().allowed(value.to(dtype), CLOSELY) for dtype in (torch.float64, torch.float32, torch.float16)
    ]
    assert by_dtype == sorted(set(by_dtype))


def test_nothing_is_allowed_of_exact_passes_integers_and_nothing() -> None:
    assert Tolerance(relative=1.0).allowed(torch.ones(2), EXACTLY) == 0.0
    assert Tolerance(relative=1.0).allowed(torch.ones(2, dtype=torch.int8), CLOSELY) == 0.0
    assert Tolerance(absolute=0.125).allowed(torch.empty(0), CLOSELY) == 0.125
    assert Tolerance(absolute=0.125).allowed(torch.tensor([nan]), CLOSELY) == 0.125


def test_a_gap_begins_beyond_the_tolerance() -> None:
    before, tolerance = torch.tensor([4.0, 1.0]), Tolerance(relative=0.25, absolute=0.0)
    assert gap(before, torch.tensor([4.0, 2.0]), CLOSELY, tolerance) is None
    found = gap(before, torch.tensor([4.0, 2.125]), CLOSELY, tolerance)
    assert found is not None
    assert (found.size, found.allowed) == (1.125, 1.0)
    assert gap(before, torch.tensor([4.0, 2.0]), EXACTLY, tolerance) is not None


def test_float8_is_compared_as_the_numbers_it_holds() -> None:
    """torch has no comparison of its own for it."""
    left = torch.tensor([1.0, nan, 2.0]).to(torch.float8_e4m3fn)
    right = torch.tensor([1.0, nan, 2.5]).to(torch.float8_e4m3fn)
    assert distance(left, left.clone()) == 0.0
    assert distance(left, right) == 0.5
