"""Measuring how cost grows with size, by time, by the number of Python calls, and by memory."""

from __future__ import annotations

import gc
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

Action = Callable[[], Any]


def exponent(costs: Mapping[int, float]) -> float:
    """The slope of the least-squares line through (log size, log cost): 1 is linear, 2 quadratic."""
    xs = [math.log(size) for size in costs]
    ys = [math.log(cost) for cost in costs.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def seconds(action: Action) -> float:
    """Processor time of one run. The collector is held off: it visits every live object, whoever made it."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        action()
        return time.process_time() - start
    finally:
        gc.enable()


def calls(action: Action) -> int:
    """How many calls, Python's and C's, one run makes: a measure of work without noise."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    earlier = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(earlier)
    return count


def peak_memory(make: Callable[[], Action]) -> tuple[int, int]:
    """(bytes that what `make` built occupies, peak of bytes while the action it gave runs)."""
    gc.collect()
    tracemalloc.start()
    try:
        action = make()
        gc.collect()
        built = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        action()
        return built, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
