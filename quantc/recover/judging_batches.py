"""The batches that passes of `qc.recover` run whole programs on."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

BATCHES: ContextVar[tuple[Any, ...]] = ContextVar("BATCHES", default=())
"""Choices are made on those of even number, and judged on those of odd number."""
