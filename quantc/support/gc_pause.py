"""Pausing Python's garbage collector while many objects are allocated.

Copying and rewriting a graph allocates tens of thousands of long-lived objects; the collector traverses all of them
again and again, which takes longer than the work itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Disable garbage collection in this context; restore the previous state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
