"""How far each kernel is from the op it stands for, given the same inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from quantc.kernels.joining import stands_for
from quantc.kernels.packed import Kernel

if TYPE_CHECKING:
    from quantc.kernels.lowered import Lowered


@dataclass(frozen=True, slots=True)
class Gap:
    """One kernel against its op. Bytes are counted in steps; floats relative to the largest of them."""

    node: str
    kernel: str
    steps: int
    """The most that a byte differs by."""
    differing: float
    """Which part of the bytes differs at all."""
    relative: float
    """The most that a float differs by, over the largest float."""

    def __str__(self) -> str:
        return f"{self.node} ({self.kernel}): {self.steps} steps, {self.differing:.2%} differ; {self.relative:.1e}"


def kernel_agreement(lowered: Lowered, *args: Any, **kwargs: Any) -> tuple[Gap, ...]:
    """Run the program op by op as it is written, and each kernel on the inputs its op had there."""
    values = _Values(lowered.program.module)
    with torch.no_grad():
        values.run(*pytree.tree_leaves((args, kwargs)), enable_io_processing=False)
        return tuple(_gap(node, lowered, values.by_name) for node in _kernel_nodes(lowered.module))


class _Values(fx.Interpreter):
    """Runs a program and keeps what each node yields."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.by_name: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.by_name[n.name] = value
        return value


def _kernel_nodes(module: fx.GraphModule) -> list[fx.Node]:
    found = (node for node in module.graph.nodes if node.op == "call_module")
    return [node for node in found if isinstance(module.get_submodule(str(node.target)), Kernel)]


def _gap(node: fx.Node, lowered: Lowered, values: dict[str, Any]) -> Gap:
    kernel: Any = lowered.module.get_submodule(str(node.target))
    # a kernel may write over what it is given
    inputs = [_copied(values[stands_for(item)]) for item in node.args if isinstance(item, fx.Node)]
    names = stands_for(node) if isinstance(stands_for(node), tuple) else (stands_for(node),)
    made_by_it = pytree.tree_leaves(kernel(*inputs))
    pairs = list(zip(made_by_it, pytree.tree_leaves([values[name] for name in names]), strict=True))
    steps, differing, relative = 0, 0.0, 0.0
    for made, wanted in pairs:
        if wanted.dtype.is_floating_point:
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            apart = float((made - wanted).abs().max()) if wanted.numel() else 0.0
            relative = max(relative, apart / largest if largest else apart)
        else:
            apart = (made.int() - wanted.int()).abs()
            steps = max(steps, int(apart.max()) if apart.numel() else 0)
            differing = max(differing, float((apart > 0).float().mean()) if apart.numel() else 0.0)
    return Gap(", ".join(names), kernel.name, steps, differing, relative)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
