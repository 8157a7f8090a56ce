"""Integer norms: exact sums, an integer square root, a division."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from quantc.integer.library import OPS, integer_op
from quantc.spec.aten_arithmetic import aten, center, round_to_grid

NORMALIZED = (
    "c = xq − xz; S = Σ c, Q = Σ c² over the n elements of a row; D = n·Q − S² + eps·n²/sx² (without S for rms_norm); "
    "r = 1 / √D as an integer of 52 places; out = clamp(round((n·c − S) · r · gamma/so + beta/so) + zo)"
)
NORM_DEVIATION = (
    "2^-29 + √D · 2^-52 of what beta is added to, in steps: for rows of 768 in 8 bits less than 2^-28 of it; "
    "with multiplier='fixed' also 2^-(30 − ⌈log2(n) / 2⌉) · gamma/so steps"
)
ROOM = 62
"""Integers stay below two to this."""
RECIPROCAL_PLACES = 52
"""With these a reciprocal is a float64 number too."""
NARROW = (torch.int8, torch.uint8)


def _normalize_fast(
    x: Tensor,
    x_zero_point: int,
    length: int,
    centre: bool,
    eps: int,
    places: int,
    multiplier: Tensor,
    offset: Tensor | None,
    shift: Tensor | None,
    out_zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    """`normalize` on integers kept as float64, in place. They stay below 2^53, so all is exact until the product with
    the reciprocal, which the reference too rounds to a float64."""
    if shift is not None or x.dtype not in NARROW or reciprocal_places(length) < RECIPROCAL_PLACES:
        out = (multiplier, offset, shift, out_zero_point, qmin, qmax, dtype)
        exact: Tensor = normalize(x, x_zero_point, length, centre, eps, places, *out)
        return exact
    rows = x.reshape(-1, length).to(torch.float64).sub_(x_zero_point)
    spread = rows.square().sum(dim=1, keepdim=True).to(torch.int64).mul_(length)
    total = rows.sum(dim=1, keepdim=True)
    rows.mul_(length)
    if centre:
        rows.sub_(total)
        spread.sub_(total.to(torch.int64).square_())
    reciprocal = reciprocal_root(spread, eps, places, length)
    normal = rows.mul_(reciprocal.to(torch.float64)).reshape(x.shape).mul_(multiplier)
    if offset is not None:
        normal.add_(offset)
    return normal.round_().add_(out_zero_point).clamp_(qmin, qmax).to(dtype)


@integer_op(
    "normalize(Tensor x, int x_zero_point, int length, bool centre, int eps, int places, "
    "Tensor multiplier, Tensor? offset, Tensor? shift, int out_zero_point, int qmin, int qmax, ScalarType dtype) "
    "-> Tensor",
    formula=NORMALIZED,
    deviation=NORM_DEVIATION,
    kernel=_normalize_fast,
)
def normalize(
    x: Tensor,
    x_zero_point: int,
    length: int,
    centre: bool,
    eps: int,
    places: int,
    multiplier: Tensor,
    offset: Tensor | None,
    shift: Tensor | None,
    out_zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows of `length` elements normalized to mean 0 (if `centre`) and variance 1, then multiplied and offset.

    `eps` is on the scale of the squares, with `places` fractional bits. Before the multiplication a normalized number
    has `reciprocal_places(length)` of them; with `shift` only `fixed_places(length)`.
    """
    rows = aten.reshape.default(center(x, x_zero_point, torch.int32), [-1, length])
    away, spread = _deviations(rows, length, centre, x.dtype)
    normal = aten.mul.Tensor(away, reciprocal_root(spread, eps, places, length))
    if shift is not None:
        normal = aten.bitwise_right_shift.Tensor_Scalar(normal, reciprocal_places(length) - fixed_places(length))
    wide = torch.float64 if shift is None else torch.int64
    normal = aten.to.dtype(aten.reshape.default(normal, x.shape), wide)
    total = aten.mul.Tensor(normal, aten.to.dtype(multiplier, wide))
    if offset is not None:
        total = aten.add.Tensor(total, offset)
    return round_to_grid(total, shift, out_zero_point, qmin, qmax, dtype)


NORMALIZE = OPS["normalize"]


def _deviations(rows: Tensor, length: int, centre: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`n·c − S` and `n·Q − S²`, exactly, in int64."""
    wide = aten.to.dtype(rows, torch.int64)
    values = rows if dtype in NARROW else wide
    squares = aten.sum.dim_IntList(aten.mul.Tensor(values, values), [1], True, dtype=torch.int64)
    away, spread = aten.mul.Tensor(wide, length), aten.mul.Tensor(squares, length)
    if not centre:
        return away, spread
    total = aten.sum.dim_IntList(rows, [1], True, dtype=torch.int64)
    return aten.sub.Tensor(away, total), aten.sub.Tensor(spread, aten.mul.Tensor(total, total))


def reciprocal_places(length: int) -> int:
    """Fractional bits of reciprocal roots. A deviation is at most `√length` roots, so the product fits."""
    return min(RECIPROCAL_PLACES, ROOM - _half_bits(length))


def _half_bits(length: int) -> int:
    """The bits of the root of a length."""
    return math.ceil(math.log2(length) / 2)


def reciprocal_root(spread: Tensor, eps: int, places: int, length: int) -> Tensor:
    """`1 / √(spread + eps)` with `reciprocal_places(length)` fractional bits, rounded down.

    A spread is an integer. Where it is 0 all deviations are 0, so the value of the root does not matter.
    """
    up = _even_places(aten.clamp.default(aten.add.Tensor(spread, eps >> places), 1))
    down = aten.sub.Tensor(aten.full_like.default(up, places), up)
    variance = aten.add.Tensor(
        aten.bitwise_left_shift.Tensor(spread, up),
        aten.bitwise_right_shift.Tensor(aten.full_like.default(up, eps), down),
    )
    root = integer_root(aten.clamp.default(variance, 2 ** (ROOM - 3)))
    # 2^61 / root to its last place, then as many places more as are wanted, or fewer
    high = aten.full_like.default(root, 2 ** (ROOM - 1))
    whole = aten.div.Tensor_mode(high, root, rounding_mode="floor")
    rest = aten.sub.Tensor(high, aten.mul.Tensor(whole, root))
    half = aten.bitwise_right_shift.Tensor_Scalar(up, 1)
    more = aten.add.Tensor(half, reciprocal_places(length) - (ROOM - 1))
    left, right = aten.clamp.default(more, 0), aten.clamp.default(aten.neg.default(more), 0)
    behind = aten.div.Tensor_mode(aten.bitwise_left_shift.Tensor(rest, left), root, rounding_mode="floor")
    whole = aten.add.Tensor(aten.bitwise_left_shift.Tensor(whole, left), behind)
    result: Tensor = aten.bitwise_right_shift.Tensor(whole, right)
    return result


def _even_places(value: Tensor) -> Tensor:
    """Largest even left shift that keeps numbers of 1..2^61 below 2^61.

    So the roots of the shifted numbers have 30 or 31 bits, however small they were.
    """
    places = aten.full_like.default(value, 0)
    for step in (32, 16, 8, 4, 2):
        has_room = aten.to.dtype(aten.lt.Scalar(value, 2 ** (ROOM - 1 - step)), torch.int64)
        value = aten.bitwise_left_shift.Tensor(value, aten.mul.Tensor(has_room, step))
        places = aten.add.Tensor(places, aten.mul.Tensor(has_room, step))
    return places


def integer_root(value: Tensor) -> Tensor:
    """Floor square root of numbers of 2^59..2^62, by Newton's method on integers.

    The start is less than three times the root. The relative error is 2, 2/3, 0.14, 0.01, 4e-5, 7e-10 at worst, always
    from above: after five iterations at most one is left to subtract.
    """
    root = aten.full_like.default(value, 2 ** (ROOM // 2))
    for _ in range(5):
        quotient = aten.div.Tensor_mode(value, root, rounding_mode="floor")
        root = aten.bitwise_right_shift.Tensor_Scalar(aten.add.Tensor(root, quotient), 1)
    too_large = aten.gt.Tensor(aten.mul.Tensor(root, root), value)
    result: Tensor = aten.sub.Tensor(root, aten.to.dtype(too_large, torch.int64))
    return result


@dataclass(frozen=True)
class Eps:
    """The eps of a variance: an integer with a number of fractional bits."""

    value: int
    places: int


def eps_of(length: int, reach: int, eps: float, scale: float) -> Eps | None:
    """The `eps` for rows of `length` integers up to `reach`, on the scale of `n·Q − S²`, with as many fractional bits
    as fit. None if the squares of the integers do not fit.
    """
    real = Fraction(eps) * length**2 / Fraction(scale) ** 2
    if length**2 * reach**2 + real >= 2 ** (ROOM - 1) - 1:
        return None
    places = ROOM - max(math.floor(real).bit_length(), 1)
    return Eps(math.floor(real * 2**places), places)


def fixed_places(length: int) -> int:
    """Fractional bits that a normalized number keeps for an int32 mantissa: with them it is below 2^31."""
    return ROOM // 2 - 1 - _half_bits(length)


__all__ = [
    "NORMALIZE",
    "NORMALIZED",
    "NORM_DEVIATION",
    "Eps",
    "eps_of",
    "fixed_places",
    "integer_root",
    "normalize",
    "reciprocal_places",
    "reciprocal_root",
]
