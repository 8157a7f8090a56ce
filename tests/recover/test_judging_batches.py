"""Batches to judge on are those of a context, and few."""

from __future__ import annotations

from quantc.recover.judging_batches import BATCHES, MOST, judging_on


def test_a_context_has_the_first_batches() -> None:
    assert BATCHES.get() == ()
    with judging_on(iter(range(10))):
        assert BATCHES.get() == tuple(range(MOST))
    assert BATCHES.get() == ()
