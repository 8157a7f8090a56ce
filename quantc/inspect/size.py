"""How much room a program's parameters and buffers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantc.program import Program
from quantc.scales import spec_of
from quantc.store.tensors import TensorWriter


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of parameters and buffers, before and after."""

    before: int
    after: int
    in_a_file: int | None = None
    """What `after` takes once it is saved, where that is less: integers narrower than a byte are packed then."""

    @property
    def ratio(self) -> float:
        """What is left of it; 1 where there was nothing."""
        return self.after / self.before if self.before else 1.0

    def __str__(self) -> str:
        packed = f", {self.in_a_file:,} in a file" if self.in_a_file is not None else ""
        return f"{self.before:,} bytes before, {self.after:,} after ({self.ratio:.3f} of it){packed}"

    def to_data(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "ratio": self.ratio, "in_a_file": self.in_a_file}


def size_of(model: Program | nn.Module) -> int:
    """The bytes of parameters and buffers; what is tied counts once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(model).values())


def size_in_a_file(program: Program) -> int | None:
    """The bytes of parameters and buffers as they are saved, if some of them are narrower than a byte."""
    if all(spec_of(group).dtype.bits >= 8 for group in program.plan.groups):
        return None
    writer = TensorWriter()
    for name, tensor in _tensors(program).items():
        writer.add(name, tensor)
    return sum(tensor.numel() * tensor.element_size() for tensor in writer.stored.values())


def size(before: Program | nn.Module, after: Program | nn.Module) -> Size:
    """The size of two models or programs, side by side."""
    return Size(size_of(before), size_of(after), size_in_a_file(after) if isinstance(after, Program) else None)


def _tensors(model: Program | nn.Module) -> dict[str, Tensor]:
    root = model.root if isinstance(model, Program) else model
    return {**dict(root.named_parameters()), **dict(root.named_buffers())}
