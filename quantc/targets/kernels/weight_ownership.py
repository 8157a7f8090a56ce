"""Weight ownership: releases plain weights that packed ones hold too, so that each weight exists once.

A kernel packs its weight at the first call and can unpack it. From then on the program's own tensor is released;
`Lowered.program` returns a program with the weights unpacked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a kernel's buffer that hold a tensor of the program."""

    kernel: Kernel
    buffer: str
    start: int
    stop: int

    def like(self, tensor: Tensor) -> Tensor:
        """The plain tensor for a released placeholder."""
        return self.kernel.plain_buffers()[self.buffer][self.start : self.stop].clone().reshape(tensor.shape)


class Holdings:
    """Tensors of a program that are released in favour of packed weights."""

    def __init__(self, program: Program, module: fx.GraphModule) -> None:
        self.program, self.module = program, module
        self.parts: dict[str, WeightPart] = {}
        """By the name of the program's tensor."""

    @torch.inference_mode(False)
    def release(self) -> None:
        """Release every plain weight that its kernel can restore bit for bit."""
        names = _by_storage(self.program.root)
        for kernel in self.module.modules():
            if isinstance(kernel, Kernel) and not kernel._dropped:
                self._release(kernel, names)
        for name in self.parts:
            _put(self.program.root, name, _nothing)
        self.program.touch()  # the module that was made of it has the tensors too

    def _release(self, kernel: Kernel, names: dict[tuple[int, torch.Size], list[str]]) -> None:
        packed = kernel._packed
        if packed is None:
            return  # not run yet: a branch that was not taken
        dropped: list[str] = []
        for buffer, plain in kernel.unpack(packed).items():
            parts = list(_parts(kernel, buffer))
            if all(torch.equal(plain[part.start : part.stop], tensor) for part, tensor in parts):
                dropped.append(buffer)
                for part, tensor in parts:
                    self.parts.update(dict.fromkeys(names.get(_place(tensor), ()), part))
        kernel.drop(dropped)
        kernel.made_of = ()

    def whole(self) -> Program:
        """The program with all weights plain; the same object, if none was released."""
        if not self.parts:
            return self.program
        made = self.program.draft()
        for name, part in self.parts.items():
            _put(made.root, name, part.like)
        return made


def _parts(kernel: Kernel, buffer: str) -> Iterator[tuple[WeightPart, Tensor]]:
    """The rows of a buffer that came from one kernel each, and the plain tensor they were made of."""
    start = 0
    for one in kernel.made_of or (kernel,):
        plain = one._buffers[buffer]
        if plain is not None:
            yield WeightPart(kernel, buffer, start, start + plain.shape[0]), plain
            start += plain.shape[0]


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _by_storage(root: nn.Module) -> dict[tuple[int, torch.Size], list[str]]:
    """Names of a program's tensors, by storage."""
    found: dict[tuple[int, torch.Size], list[str]] = {}
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            found.setdefault(_place(tensor), []).append(name)
    return found


def _nothing(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _put(root: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Put another tensor in the place of one of a module's."""
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    buffer, parameter = owner._buffers.get(last), owner._parameters.get(last)
    if buffer is not None:
        owner._buffers[last] = change(buffer)
    if parameter is not None:
        owner._parameters[last] = nn.Parameter(change(parameter), requires_grad=False)
