"""Memory of a lowered module's weights: plain, packed, and in the float model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from quantc.integer.library import op_of
from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel
from quantc.text.digests import graph_constants

FLOAT_BYTES = 4
GRID = ("scale", "zero_point", "multiplier", "shift")
"""Arguments of ops that belong to a grid: float ops have none."""
KILO = 1000


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of weights: plain, packed, and in float."""

    plain: int
    """Held as tensors."""
    packed: int
    """Held as kernels want them; nothing before the first call."""
    in_float: int
    """Size of the same weights in float32."""

    @property
    def held(self) -> int:
        return self.plain + self.packed

    @property
    def share(self) -> float:
        """Fraction of the weights' size in float32; 1 if there are none."""
        return self.held / self.in_float if self.in_float else 1.0

    def to_data(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        share = f", {self.share:.2f} of float" if self.in_float else ""
        return f"weights: {_size(self.held)} ({_size(self.packed)} of it packed){share}"


def _size(count: int) -> str:
    return f"{count / KILO**2:.1f} MB" if count >= KILO**2 else f"{count / KILO:.1f} kB"


def memory_of(program: Program, module: nn.Module) -> Memory:
    """Memory of a program's weights and of the lowered module's."""
    held: dict[int, int] = {}
    packed = 0
    for tensor in _tensors(program.root, module):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for kernel in module.modules():
        if isinstance(kernel, Kernel):
            packed += _packed_bytes(kernel, held)
    return Memory(sum(held.values()), packed, _in_float(program))


def _tensors(*roots: nn.Module) -> Iterator[Tensor]:
    for root in roots:
        for tensor in (*root.parameters(), *root.buffers()):
            if tensor.numel() and not tensor.is_meta:
                yield tensor


def _packed_bytes(kernel: Kernel, held: dict[int, int]) -> int:
    """Bytes packed by a kernel, except tensors that are held plain. Opaque packed objects count as large as their weights."""
    hidden: set[str] = set()
    total = 0
    for part in _parts(kernel._packed):
        if not isinstance(part, Tensor):
            hidden.add(str(part._type()))
        elif part.layout is not torch.strided:
            total += part.numel() * part.element_size()
        elif part.untyped_storage().data_ptr() not in held:
            held[part.untyped_storage().data_ptr()] = 0
            total += part.untyped_storage().nbytes()
    return total + len(hidden) * _weight_bytes(kernel)


def _parts(packed: Any) -> Iterator[Any]:
    if isinstance(packed, dict | list | tuple):
        for part in packed.values() if isinstance(packed, dict) else packed:
            yield from _parts(part)
    elif isinstance(packed, Tensor | torch.ScriptObject):
        yield packed


def _weight_bytes(kernel: Kernel) -> int:
    """The bytes of a kernel's own weights, and of those of the kernels it stands for."""
    own = kernel.plain_buffers().values()
    total = sum(tensor.nbytes for tensor in own if not tensor.dtype.is_floating_point)
    return total + sum(_weight_bytes(part) for part in kernel.children() if isinstance(part, Kernel))


def _in_float(program: Program) -> int:
    """The float weights of a program: every constant that is not part of a grid."""
    grids = {id(tensor) for node in program.nodes() for tensor in _grid(program, node)}
    weights = {id(tensor): tensor for tensor in graph_constants(program).values() if id(tensor) not in grids}
    return sum(FLOAT_BYTES * tensor.numel() for tensor in weights.values())


def _grid(program: Program, node: fx.Node) -> Iterator[Tensor]:
    target: Any = node.target
    if op_of(target) is None:
        return
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        if any(argument.name.endswith(word) or argument.name.endswith(f"{word}s") for word in GRID):
            for item in value if isinstance(value, list | tuple) else (value,):
                tensor = program.tensor(item) if isinstance(item, fx.Node) else None
                if tensor is not None:
                    yield tensor
