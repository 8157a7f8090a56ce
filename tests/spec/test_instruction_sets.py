"""How processors add 8-bit products, and what a sum of two can reach."""

from __future__ import annotations

import pytest

from quantc.errors import UnknownNameError
from quantc.spec.instruction_sets import INSTRUCTION_SETS, PairSums, instruction_set


def largest_pair(pairs: PairSums, qmin: int, qmax: int, signed: bool) -> int:
    """The largest size of a sum of two products with weights of -128..127."""
    ends = pairs.multiplied(qmin, qmax, signed)
    return max(abs(2 * activation * weight) for activation in ends for weight in (-128, 127))


def test_bytes_of_the_other_kind_are_shifted() -> None:
    unsigned, signed = PairSums("unsigned", "saturates"), PairSums("signed", "wraps around")
    assert unsigned.multiplied(0, 255, signed=False) == (0, 255)
    assert unsigned.multiplied(-128, 127, signed=True) == (0, 255)
    assert signed.multiplied(-128, 127, signed=True) == (-128, 127)
    assert signed.multiplied(0, 255, signed=False) == (-128, 127)
    assert unsigned.multiplied(-64, 63, signed=True) == (64, 191)


def test_sets_with_pairs_are_those_whose_sums_can_leave_16_bits() -> None:
    paired = {name for name, found in INSTRUCTION_SETS.items() if found.pairs is not None}
    assert paired == {"avx2", "avx512", "neon-mlal"}
    for name in paired:
        pairs = INSTRUCTION_SETS[name].pairs
        assert pairs is not None
        assert largest_pair(pairs, -128, 127, signed=True) > 2 ** (pairs.bits - 1) - 1
        assert largest_pair(pairs, 0, 127, signed=False) <= 2 ** (pairs.bits - 1)


def test_sets_are_found_by_their_own_names() -> None:
    for name, found in INSTRUCTION_SETS.items():
        assert instruction_set(name) is found
        assert str(found).startswith(f"{name}: ")


def test_an_unknown_set_is_refused_with_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="instruction set 'avx3'") as caught:
        instruction_set("avx3")
    assert caught.value.advice is not None
    assert "avx2" in caught.value.advice
