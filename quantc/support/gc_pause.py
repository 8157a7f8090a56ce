"""Python's garbage collector, out of the way while many objects are made.

Copying and rewriting a graph makes tens of thousands of objects that stay; the collector goes over all of them again
and again, which takes longer than the work itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collections in here; afterwards as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
