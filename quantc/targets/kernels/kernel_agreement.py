"""Difference between each kernel and the op it replaces, on the same inputs.

A kernel that quantizes its input may round a value halfway between two levels to the other one. So the levels it makes
are compared with the program's, and its op is run on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from quantc.qdq.ops import is_quantize
from quantc.targets.kernels.kernel import Kernel

if TYPE_CHECKING:
    from quantc.targets.kernels.lowered import Lowered


@dataclass(frozen=True, slots=True)
class KernelGap:
    """Difference of one kernel from its op: in steps for 8-bit results, relative to the largest value for floats."""

    node: str
    kernel: str
    steps: int
    """The most that a byte differs by."""
    differing: float
    """Fraction of the bytes that differ."""
    relative: float
    """The most that a float differs by, over the largest float."""

    def __str__(self) -> str:
        return f"{self.node} ({self.kernel}): {self.steps} steps, {self.differing:.2%} differ; {self.relative:.1e}"


def kernel_agreement(lowered: Lowered, *args: Any, **kwargs: Any) -> tuple[KernelGap, ...]:
    """Run the program op by op, and each kernel on the inputs of its op."""
    values = _Values(lowered.program.module)
    with torch.no_grad():
        values.run(*pytree.tree_leaves((args, kwargs)), enable_io_processing=False)
        return tuple(_gap(node, lowered, values) for node in _kernel_nodes(lowered.module))


class _Values(fx.Interpreter):
    """Runs a program and keeps what each node yields."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.by_name: dict[str, Any] = {}
        self.nodes = {node.name: node for node in module.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.by_name[n.name] = value
        return value

    def again(self, name: str, known: dict[str, Any]) -> Any:
        """Value of a node when earlier nodes have the values in `known`; recomputed values are added to `known`."""
        for node in self.nodes.values():
            if node.name not in known and any(source.name in known for source in node.all_input_nodes):
                given = fx.map_arg((node.args, node.kwargs), lambda item: known.get(item.name, self.by_name[item.name]))
                args, kwargs = given
                known[node.name] = getattr(self, node.op)(node.target, args, kwargs)
            if node.name == name:
                break
        return known[name]


def _roundings(values: _Values, names: Sequence[str], read: Sequence[str]) -> list[str]:
    """Nodes that quantize a kernel's inputs, between those and its result."""
    ahead = [values.nodes[name] for name in names]
    found: list[str] = []
    for node in ahead:
        found += [node.name] if is_quantize(node) and node.all_input_nodes[0].name in read else []
        ahead += [] if node.name in read else [item for item in node.all_input_nodes if item not in ahead]
    return list(dict.fromkeys(found))


def _kernel_nodes(module: fx.GraphModule) -> list[fx.Node]:
    found = (node for node in module.graph.nodes if node.op == "call_module")
    return [node for node in found if isinstance(module.get_submodule(str(node.target)), Kernel)]


def _gap(node: fx.Node, lowered: Lowered, values: _Values) -> KernelGap:
    kernel: Any = lowered.module.get_submodule(str(node.target))
    read = [str(lowered.stands_for(item)) for item in node.args if isinstance(item, fx.Node)]
    # a kernel may overwrite its inputs
    inputs = [_copy(values.by_name[name]) for name in read]
    found = lowered.stands_for(node)
    names = found if isinstance(found, tuple) else (found,)
    levels: Tensor | None = kernel.levels_read(*inputs)
    pairs: list[tuple[Tensor, Tensor]] = []
    known = dict(zip(read, inputs, strict=True))
    if levels is not None:
        rounded = _roundings(values, names, read)
        known.update(dict.fromkeys(rounded, levels))
        pairs = [(levels, values.by_name[name]) for name in rounded]
    expected = [values.again(name, known) if pairs else values.by_name[name] for name in names]
    made_by_it = pytree.tree_leaves(kernel(*inputs))
    pairs += zip(made_by_it, pytree.tree_leaves(expected), strict=True)
    steps, differing, relative = 0, 0.0, 0.0
    for made, wanted in pairs:
        if wanted.dtype.is_floating_point:
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            apart = float((made - wanted).abs().max()) if wanted.numel() else 0.0
            relative = max(relative, apart / largest if largest else apart)
        else:
            off = (made.int() - wanted.int()).abs()
            steps = max(steps, int(off.max()) if off.numel() else 0)
            differing = max(differing, float((off > 0).float().mean()) if off.numel() else 0.0)
    return KernelGap(", ".join(names), kernel.name, steps, differing, relative)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
