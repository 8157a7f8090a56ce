"""A contender's build of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantc.inspect.size import size_of
from quantc.targets.kernels.lowered import Lowered


@dataclass(frozen=True)
class Built:
    """A built contender, called like the model."""

    run: Callable[..., Any]
    weight_bytes: int | None
    """The bytes of its weights; None if unknown."""
    lowered: Lowered | None = None
    """The same, where it runs on quantc's kernels: of that the floor is known."""

    @staticmethod
    def of_lowered(lowered: Lowered) -> Built:
        return Built(lowered, size_of(lowered.program), lowered)
