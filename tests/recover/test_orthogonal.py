"""Rotations: orthogonal, mean-preserving, and flat."""

from __future__ import annotations

import math

import pytest
import torch

from quantc.recover.orthogonal import hadamard, rotation

KNOWN = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60, 64, 128, 140, 144, 192, 384, 576, 640, 768)


def test_rows_of_hadamard_matrices_are_orthogonal() -> None:
    for size in KNOWN:
        found = hadamard(size)
        assert found is not None, size
        assert bool((found.abs() == 1).all())
        assert torch.equal(found @ found.T, size * torch.eye(size, dtype=torch.float64))
    assert [hadamard(size) for size in (3, 6, 10, 92)] == [None] * 4


@pytest.mark.parametrize("size", [4, 8, 20, 37, 52, 64, 100, 768])
def test_a_rotation_keeps_lengths_and_the_vector_of_ones(size: int) -> None:
    found = rotation(size, 0)
    ones = torch.ones(size, dtype=torch.float64)
    torch.testing.assert_close(found @ found.T, torch.eye(size, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(found @ ones, ones, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.T @ ones, ones, atol=1e-12, rtol=0)


def test_no_element_is_much_larger_than_another() -> None:
    """A random orthogonal matrix of 768 has elements of 4.5 times the mean square; one of signs alone has 1."""
    assert float(rotation(768, 1).abs().max()) * math.sqrt(768) < 2.5


def test_the_seed_chooses() -> None:
    assert torch.equal(rotation(12, 3), rotation(12, 3))
    assert not torch.equal(rotation(12, 3), rotation(12, 4))
