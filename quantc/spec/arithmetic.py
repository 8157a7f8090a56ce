"""`Arithmetic`: how a target computes on integers, as data.

The integer form, its overflow proof and `qc.agreement` read it. A plan keeps it by the name of the quantizer that
claimed an op, so that a saved program computes the same where the target is not installed.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from quantc.spec.spec import FLOAT32_DIGITS, POWER_OF_TWO
from quantc.support.validated import Frozen

Rounding = Literal["half-even", "half-up", "half-away", "truncate", "floor"]
"""Ties to even, ties up, ties away from zero; toward zero, as a cast; down, as an arithmetic shift."""
MultiplierForm = Literal["float64", "fixed", "shift"]
"""A float64 number; a mantissa of 31 bits and a shift; a shift alone."""
MultiplierChoice = Literal["target", "float64", "fixed", "shift"]
"""The form of the target, or another."""

INT32_BITS = 32


class Arithmetic(Frozen, frozen=True):
    """Requantization of a target: `saturate(round(acc * M) + zero_point)`."""

    noun: ClassVar[str] = "arithmetic"

    rounding: Rounding = "half-even"
    """Of accumulators onto the grid of a result. Constants and tables are rounded half to even when compiled."""
    multiplier: MultiplierForm = "float64"
    """With "shift" every ratio of scales must be a power of two; an op with another one stays float."""
    accumulator_bits: Annotated[StrictInt, Field(ge=8, le=64)] = INT32_BITS
    """Signed width. An op whose sums could leave it stays float; the integer form itself adds in 32 bits, so wider
    accumulators keep no more ops."""
    saturate: StrictBool = True
    """False: a result wraps around in its storage type, before an activation clamps it."""
    semantics: StrictStr = ""
    """`module:NAME` of a list of `quantc.integer.semantics.Semantics`: rows that come before quantc's own."""

    def why_not(self) -> str | None:
        if self.semantics and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.semantics):
            return "semantics is the place of a list, written module:NAME"
        return None

    @property
    def sum_bits(self) -> int:
        """Bits that sums of the integer form may need."""
        return min(self.accumulator_bits, INT32_BITS)

    @property
    def scale_digits(self) -> int:
        """Significant bits of scales that are raised when compiling."""
        return POWER_OF_TWO if self.multiplier == "shift" else FLOAT32_DIGITS

    @property
    def ending(self) -> tuple[str | bool, ...]:
        """The last arguments of an op that requantizes; none of them by default."""
        if self.saturate:
            return () if self.rounding == "half-even" else (self.rounding,)
        return self.rounding, self.saturate


EXACT = Arithmetic()
"""One rounding, half to even, of the exact result in float64."""
