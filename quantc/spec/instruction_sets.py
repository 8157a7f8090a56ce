"""Accumulation behaviour of processors' integer instructions, as data.

A backend names the instruction set its numbers are for.

Nothing here detects the processor: numbers would depend on the machine. The processor may decide speed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantc.errors import UnknownNameError, suggest

Neighbours = Literal["adjacent", "any"]
SIGN_SHIFT = 128
"""Offset between uint8 and int8: kernels that take only one of them shift the other by it."""


@dataclass(frozen=True, slots=True)
class PairSums:
    """Two products of 8-bit integers are added in 16 bits before they reach the 32-bit accumulator."""

    activations: Literal["unsigned", "signed"]
    """Signedness of the activations' bytes; weights are signed. The other kind is shifted by 128. Zero points are not
    subtracted."""
    overflow: Literal["saturates", "wraps around"]
    """Behaviour of a sum that does not fit 16 bits."""
    bits: int = 16
    neighbours: Neighbours = "any"
    """The pairs of products of a channel that are added: adjacent ones, or any two."""

    def multiplied(self, qmin: int, qmax: int, signed: bool) -> tuple[int, int]:
        """The smallest and the largest activation that is multiplied, for a grid of int8 (`signed`) or uint8."""
        shift = (SIGN_SHIFT if signed else 0) - (SIGN_SHIFT if self.activations == "signed" else 0)
        return qmin + shift, qmax + shift


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The accumulation of 8-bit products in a family of kernels."""

    name: str
    summary: str
    pairs: PairSums | None = None
    """None if every product is added in 32 bits at once."""

    def __str__(self) -> str:
        return f"{self.name}: {self.summary}"


_MADDUBS = PairSums("unsigned", "saturates", neighbours="adjacent")

INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    found.name: found
    for found in (
        InstructionSet("avx2", "uint8 × int8; vpmaddubsw adds two products in 16 bits and saturates", _MADDUBS),
        InstructionSet("avx512", "as avx2, on wider registers: AVX-512 without VNNI", _MADDUBS),
        InstructionSet("avx-vnni", "uint8 × int8; vpdpbusd adds four products to 32 bits"),
        InstructionSet("avx512-vnni", "as avx-vnni, on wider registers"),
        InstructionSet("neon", "zero points are taken off in 16 bits; vmlal multiplies these and adds in 32 bits"),
        InstructionSet(
            "neon-mlal",
            "int8 × int8; vmull and vmlal add two products in 16 bits, which -128..127 on both sides can leave",
            PairSums("signed", "wraps around"),
        ),
        InstructionSet("neon-dot", "int8 × int8; sdot adds four products to 32 bits"),
    )
}
"""By name."""


def instruction_set(name: str) -> InstructionSet:
    """The instruction set of that name."""
    found = INSTRUCTION_SETS.get(name)
    if found is None:
        advice = suggest(name, INSTRUCTION_SETS, noun="instruction sets")
        raise UnknownNameError(f"unknown instruction set {name!r}", advice=advice)
    return found
