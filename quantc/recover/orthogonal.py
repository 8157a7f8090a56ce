"""Orthogonal matrices that spread every direction over all components."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotation(size: int, seed: int) -> Tensor:
    """An orthogonal matrix, float64, that leaves the vector of ones alone: `R @ 1 = 1 = R.T @ 1`.

    So the mean of a vector is that of the rotated one, and layer norms commute with it. It is a Hadamard matrix with
    random signs, as far as one of the size is known, times a reflection: no element is much larger than another.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = _spread(size, generator)
    signs = 1.0 - 2.0 * torch.randint(0, 2, (2, size), generator=generator).double()
    spread = signs[0, :, None] * spread * signs[1]
    ones = torch.ones(size, dtype=torch.float64)
    return _reflected(spread, spread @ ones - ones)


def _reflected(matrix: Tensor, normal: Tensor) -> Tensor:
    length = float(normal @ normal)
    if length < torch.finfo(torch.float64).eps:
        return matrix
    return matrix - (2.0 / length) * torch.outer(normal, normal @ matrix)


def _spread(size: int, generator: torch.Generator) -> Tensor:
    """The Kronecker product of the largest Hadamard matrix whose size divides this, and a random orthogonal matrix."""
    rest = 1
    while size % rest or (found := hadamard(size // rest)) is None:
        rest += 1
    other = torch.linalg.qr(torch.randn(rest, rest, generator=generator, dtype=torch.float64))[0]
    return torch.kron(found / math.sqrt(size // rest), other.contiguous())


def hadamard(size: int) -> Tensor | None:
    """A matrix of 1 and -1 with orthogonal rows; None if no construction here gives one of the size."""
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if size == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    if size % 4:
        return None
    if _is_prime(size - 1):
        return _paley_one(size - 1)
    if _is_prime(size // 2 - 1) and (size // 2 - 1) % 4 == 1:
        return _paley_two(size // 2 - 1)
    half = hadamard(size // 2)
    two = hadamard(2)
    return None if half is None or two is None else torch.kron(two, half)


def _paley_one(prime: int) -> Tensor:
    """Of size prime + 1, for a prime that is 3 modulo 4."""
    skew = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1.0, -1.0, _characters(prime)
    return skew + torch.eye(prime + 1, dtype=torch.float64)


def _paley_two(prime: int) -> Tensor:
    """Of size 2 (prime + 1), for a prime that is 1 modulo 4."""
    symmetric = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    symmetric[0, 1:], symmetric[1:, 0], symmetric[1:, 1:] = 1.0, 1.0, _characters(prime)
    eye = torch.eye(prime + 1, dtype=torch.float64)
    off = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    on = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(symmetric, off) + torch.kron(eye, on)


def _characters(prime: int) -> Tensor:
    """1 where the difference of row and column is a square modulo the prime, -1 where not, 0 on the diagonal."""
    index = torch.arange(prime)
    character = torch.full((prime,), -1.0, dtype=torch.float64)
    character[index[1:].square() % prime] = 1.0
    character[0] = 0.0
    return character[(index[:, None] - index[None, :]) % prime]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))
