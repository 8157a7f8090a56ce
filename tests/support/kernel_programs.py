"""Programs written by hand whose nodes run on kernels written by hand."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_nodes import kernels_of
from tests.support.by_hand import Builder


class Scaling(Kernel):
    """Multiplies rows by a weight, and may take a relu in; several that read the same are one."""

    name: ClassVar[str] = "scaling"
    any_order: ClassVar[bool] = True

    def __init__(self, weight: Tensor, key: Hashable = None, *, absorbs: bool = True) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.key, self.absorbs, self.does_relu = key, absorbs, False

    def pack(self) -> Any:
        return self.get_buffer("weight").clone()

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": packed.clone()}

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        made = inputs[0] * packed
        return made.relu() if self.does_relu else made

    def absorb(self, op: str) -> bool:
        self.does_relu = self.absorbs and op == "relu"
        return self.does_relu

    @property
    def joins(self) -> Hashable:
        return self.key

    @classmethod
    def joined(cls, kernels: Sequence[Kernel]) -> Kernel:
        return Together([kernel for kernel in kernels if isinstance(kernel, Scaling)])


class Together(Scaling):
    """Several scalings of one tensor."""

    name: ClassVar[str] = "scalings"

    def __init__(self, kernels: Sequence[Scaling]) -> None:
        super().__init__(torch.cat([kernel.get_buffer("weight") for kernel in kernels]))
        self.sizes = [len(kernel.get_buffer("weight")) for kernel in kernels]

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return [inputs[0] * part for part in packed.split(self.sizes)]


def on_kernel(build: Builder, name: str, kernel: Kernel, source: fx.Node) -> fx.Node:
    """A node that runs a kernel, named as placement names it; its type is that of its source."""
    target = f"kernel_{name}"
    build.root.add_module(target, kernel)
    node = build.graph.create_node("call_module", target, (source,), name=target)
    build.values[node] = kernel(build.values[source])
    kernel.forget_packed()
    node.meta["val"] = source.meta["val"]
    return node


ROW = torch.tensor([[1.0, -2.0, 3.0]])
WEIGHT = torch.tensor([2.0, 2.0, -1.0])


def kernels(program: Program) -> list[Any]:
    """The kernels of the top graph, in order."""
    return [kernel for _, kernel in kernels_of(program, program.graph)]


def calls(program: Program) -> list[str]:
    """The ops that run on no kernel."""
    return [node.name for node in program.nodes() if node.op == "call_function"]
