"""How much room a program's parameters and buffers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantc.program import Program


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of parameters and buffers, before and after."""

    before: int
    after: int

    @property
    def ratio(self) -> float:
        """What is left of it; 1 where there was nothing."""
        return self.after / self.before if self.before else 1.0

    def __str__(self) -> str:
        return f"{self.before:,} bytes before, {self.after:,} after ({self.ratio:.3f} of it)"

    def to_data(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "ratio": self.ratio}


def size_of(model: Program | nn.Module) -> int:
    """The bytes of parameters and buffers; what is tied counts once."""
    root = model.root if isinstance(model, Program) else model
    tensors: list[Tensor] = [*root.parameters(), *root.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def size(before: Program | nn.Module, after: Program | nn.Module) -> Size:
    """The size of two models or programs, side by side."""
    return Size(size_of(before), size_of(after))
