"""Argument cache: arguments like those of an earlier call are not validated again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

MAX_KNOWN = 256
"""Capacity in kinds."""
Kind = tuple[Any, ...]


class KnownArguments:
    """Types and shapes of positional tensors that are known to fit a program.

    Validating each argument takes as long as a small layer: 40 µs per call.
    """

    def __init__(self) -> None:
        self._kinds: set[Kind] = set()

    @staticmethod
    def kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
        """Cache key of arguments; None unless all are plain positional tensors that require no gradient and are not nested."""
        if kwargs or not all(type(x) is Tensor and not (x.requires_grad or x.is_nested) for x in args):
            return None
        return tuple((x.shape, x.dtype, x.device, x.layout) for x in args)

    def __contains__(self, kind: Kind | None) -> bool:
        return kind in self._kinds

    def add(self, kind: Kind | None) -> None:
        if kind is not None and len(self._kinds) < MAX_KNOWN:
            self._kinds.add(kind)
