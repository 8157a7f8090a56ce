"""Weights that float16 represents exactly, up to one factor per output.

fbgemm multiplies float32 inputs by float16 weights and accumulates in float32, so a weight that is exact in float16
loses nothing and half the memory is read. 8-bit integers and fp8 numbers are exact: the scale of their channel is the
factor. Groups with scales of few significant bits are exact as they are. A power of two brings values into float16's
range; that is exact too, and the factor undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.integer.ops.weight_only import BYTES
from quantc.targets.kernels.stored_weight import StoredWeight

LEVELS = (torch.int8, torch.uint8, *BYTES)
"""Formats whose numbers, without a scale, are all exact."""
LARGEST = torch.finfo(torch.float16).max
SMALLEST_EXPONENT = -14
"""Of float16 numbers with all their bits."""
NEAR_ONE, NEAR_LARGEST = 0, 15
"""Exponent that the largest weight of a row is scaled to: near one, sums stay far from overflow; near the largest, more
of the small weights are exact."""
BLOCK = 1 << 22
"""Number of elements checked at a time; each takes 8 bytes of scratch memory."""


@dataclass(frozen=True, eq=False)
class Halves:
    """A matrix with one row per output, of float32 numbers that are exact in float16, and a factor per output."""

    matrix: Tensor
    factor: Tensor | None
    """One for each row; None if all are 1."""


def are_exact(weight: StoredWeight) -> bool:
    """True if `exact_halves` returns a matrix."""
    has_levels = weight.row_scale is not None and weight.w.dtype in LEVELS
    return has_levels or exact_halves(weight) is not None


@torch.no_grad()
def exact_halves(weight: StoredWeight) -> Halves | None:
    """A weight in float16; None if it is not exact."""
    scale = weight.row_scale
    matrix = weight.rows(weight.real() if scale is None else weight.levels())
    powers: list[Tensor] = []
    first = 0
    for rows in torch.split(matrix, max(1, BLOCK // max(1, matrix.shape[1]))):
        last = first + len(rows)
        power = _power_of_reals(rows) if scale is None else _power_of_levels(rows, scale[first:last])
        scaled = torch.ldexp(rows.double(), power.unsqueeze(1))
        if not _is_exact(scaled):
            return None
        rows.copy_(scaled)
        powers.append(power)
        first = last
    power = torch.cat(powers)
    factor = torch.ldexp(torch.ones(len(power)).double() if scale is None else scale.double(), -power).float()
    return Halves(matrix, factor if scale is not None or bool(power.any()) else None)


def _power_of_levels(levels: Tensor, scale: Tensor) -> Tensor:
    """The power of two next to the scale of each row, as far as float16 can hold the product: then sums are as large as
    those of the weights themselves."""
    sizes = levels.abs()
    largest, smallest = sizes.amax(1), torch.where(sizes == 0, torch.inf, sizes).amin(1)
    low, high = SMALLEST_EXPONENT - _exponent(smallest), _exponent(LARGEST / largest)
    power = torch.minimum(torch.maximum(_exponent(scale), low), high)
    return torch.where((largest == 0) | (low > high), 0, power)


def _power_of_reals(rows: Tensor) -> Tensor:
    """A power of two for each row with which it is exact; some other if there is none."""
    largest = rows.abs().amax(1)
    if _is_exact(rows):
        return torch.zeros_like(largest, dtype=torch.int32)
    exponent = torch.where(largest == 0, 0, _exponent(largest))
    near_one, near_largest = NEAR_ONE - exponent, NEAR_LARGEST - exponent
    return near_one if _is_exact(torch.ldexp(rows.double(), near_one.unsqueeze(1))) else near_largest


def _is_exact(numbers: Tensor) -> bool:
    return torch.equal(numbers.half().to(numbers.dtype), numbers)


def _exponent(numbers: Tensor) -> Tensor:
    """The exponent of the power of two next below."""
    return torch.frexp(numbers).exponent - 1
