"""Whole-program race: times several variants of one lowered program, interleaved.

A kernel's own time is not its full cost: code of another family must come into the cache, an add that one family fuses
is a separate op in another, and tensors change form between families. So tuning ends with a race of whole programs:
each op on its own fastest kernel, all by the cost table, and all of one family.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.targets.kernels.tuning import TURNS, low

Run = Callable[..., Any]
WARM_UP = 2
MARGIN = 0.98
"""Fraction of the best time so far that a form must beat to be preferred: a smaller gain is noise."""


def race(forms: Mapping[str, Run], inputs: Sequence[Any], turns: int = TURNS) -> dict[str, float]:
    """Times of variants in microseconds, interleaved on copies of the same inputs."""
    # CPU time is not affected by other processes, but sums over all threads
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    spent: dict[str, list[float]] = {name: [] for name in forms}
    with torch.no_grad():
        for turn in range(WARM_UP + turns):
            for name, run in forms.items():
                leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs]
                start = clock()
                run(*leaves)
                if turn >= WARM_UP:
                    spent[name].append(1e6 * (clock() - start))
    return {name: low(times) for name, times in spent.items()}


def fastest(times: Mapping[str, float]) -> str:
    """Name of the fastest variant; the earlier one on a tie."""
    best = next(iter(times))
    for name, found in times.items():
        if found < MARGIN * times[best]:
            best = name
    return best
