"""Sums of outer products, packed into the memory of one matrix."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.observe.exact_sum import fixed_point
from quantc.observe.outer_products import PANEL, OuterProducts
from tests.support.laws import law


def integers(width: int, seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(1, 30, width, generator=torch.Generator().manual_seed(seed)) * scale
    return fixed_point(rows)


@law(20)
@given(st.sampled_from([1, 2, PANEL, PANEL + 1]), st.lists(st.integers(-30, 30), min_size=1, max_size=4))
def test_the_sum_is_that_of_exact_integers(width: int, scales: list[int]) -> None:
    """Against int64: what is lost is below 2^-24 of the largest batch's diagonal."""
    total, expected = OuterProducts.zeros(1, width), torch.zeros(1, width, width, dtype=torch.float64)
    largest = torch.zeros(1, width, dtype=torch.float64)
    for seed, scale in enumerate(scales):
        whole, exponents = integers(width, seed, 10.0**scale)
        unit = 2.0 ** exponents.double()
        exact = torch.einsum("gni,gnj->gij", whole.to(torch.int64), whole.to(torch.int64)).double()
        expected += exact * unit.unsqueeze(1) * unit.unsqueeze(2)
        largest = torch.maximum(largest, exact.diagonal(dim1=1, dim2=2).sqrt() * unit)
        total.add_integers(whole, exponents)
    error = (total.value() - expected).abs()
    assert bool((error <= largest.unsqueeze(1) * largest.unsqueeze(2) * len(scales) * 2.0**-22).all())


def test_a_matrix_is_added_as_one_batch() -> None:
    whole, exponents = integers(20, 0, 3.0)
    rows = OuterProducts.zeros(1, 20)
    rows.add_integers(whole, exponents)
    again = OuterProducts.zeros(1, 20)
    again.add_matrix(rows.value())
    assert torch.allclose(again.value(), rows.value(), rtol=1e-6, atol=float(rows.value().max()) * 1e-7)
