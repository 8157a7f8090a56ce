"""The batches that passes of `qc.recover` run whole programs on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

MOST = 4
"""Number of batches that are taken."""
BATCHES: ContextVar[tuple[Any, ...]] = ContextVar("BATCHES", default=())
"""Choices are made on those of even number, and judged on those of odd number."""


@contextmanager
def judging_on(batches: Iterable[Any]) -> Iterator[None]:
    """Let passes in this context run programs on the first of these batches."""
    token = BATCHES.set(tuple(islice(batches, MOST)))
    try:
        yield
    finally:
        BATCHES.reset(token)
