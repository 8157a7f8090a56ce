"""Linear layers with a fused residual add of float results, as in transformer branches: onednn adds as it writes,
bit-identical to the two ops.

It adds in place if this is the summand's last use; otherwise the result is new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from quantc.targets.kernels.int8_linear import FEW_ROWS, OnOnednn
from quantc.targets.kernels.kernel import Kernel, KernelForm
from quantc.targets.kernels.kernel_fusion import STANDS_FOR, kernels_of, stands_for

BINARY: Any = torch.ops.onednn.qlinear_pointwise.binary
HAVE_OWN_MEMORY = ("add", "layer_norm")
"""Ops whose result is no view of what they read, and that keep none."""


class LinearSum(OnOnednn):
    """Linear layer with float result and fused add."""

    name: ClassVar[str] = "onednn qlinear + sum"
    keep = True
    """Whether the summand must not be written over; see `settle_float_summands`."""

    @staticmethod
    def of(layer: OnOnednn) -> LinearSum:
        made = LinearSum(layer.plain, layer.reading, layer.ending)
        made.in_order = layer.in_order
        return made

    @property
    def joins(self) -> None:
        return None

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, other = inputs
        if x.dim() > 1 and x.numel() > FEW_ROWS * self.shape[1]:
            return self.summed(packed)(self.reading.levels(x), other)
        return super().run(packed, x).add_(other)

    def summed(self, packed: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """Fused GEMM and add, on uint8 levels."""
        weight, multiplier, zeros, bias, *result = packed[2]
        before = (1.0, self.reading.zero_point, weight, multiplier, zeros)
        scale, zero_point, dtype, *_ = result
        how = "add" if self.keep else "sum"
        after: tuple[Any, ...] = (bias, scale, zero_point, dtype, 1.0, 0, how, 1.0, "none", [], "")
        return lambda levels, other: BINARY(levels.contiguous(), *before, other.contiguous(), *after)

    def bound(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Any]:
        summed, levels_of, most_of_few = self.summed(packed), self.reading.levels, FEW_ROWS * self.shape[1]

        def step(x: Tensor, other: Tensor) -> Any:
            if x.dim() < 2 or x.numel() <= most_of_few:
                return self.run(packed, x, other)
            return summed(levels_of(x), other)

        return step


def absorb_sums(program: Program) -> list[fx.Node]:
    """Fuse residual adds into onednn linear layers with float results that have no other user; the fused nodes."""
    found: list[fx.Node] = []
    for _, graph in program.graphs():
        layers = {
            node: layer for node, kernel in kernels_of(program, graph) if (layer := _that_adds(kernel)) is not None
        }
        for node in [node for node in graph.nodes if is_op(node, "add")]:
            own = next((item for item in node.all_input_nodes if item in layers), None)
            if own is not None and _is_plain_sum(node, own):
                _absorb(program, graph, node, own, layers[own])
                found.append(own)
    return found


def _that_adds(kernel: Kernel) -> OnOnednn | None:
    """A kernel, if it is a linear layer that can add as it writes."""
    if not isinstance(kernel, OnOnednn) or isinstance(kernel, LinearSum) or not kernel.makes_memory:
        return None
    return kernel if kernel.activation is None and not kernel.relu else None


def _is_plain_sum(node: fx.Node, own: fx.Node) -> bool:
    """True if a node adds two tensors of one type, the first of which has no other user."""
    kinds = {tensor_type(item) for item in (*node.args, node) if isinstance(item, fx.Node)}
    others = [item for item in node.args if isinstance(item, fx.Node) and item is not own]
    is_whole = len(others) == 1 and len(node.args) == 2 and not node.kwargs
    return is_whole and len(kinds) == 1 and None not in kinds and len(own.users) == 1


def _absorb(program: Program, graph: fx.Graph, node: fx.Node, own: fx.Node, layer: OnOnednn) -> None:
    other = next(item for item in node.args if item is not own)
    name = f"{own.target}_and_sum"
    program.owner(graph).add_module(name, LinearSum.of(layer))
    made = program.emit(name, (own.args[0], other), before=node, like=node)
    made.meta[STANDS_FOR] = stands_for(node)
    program.replace(node, made)
    path, _, last = str(own.target).rpartition(".")
    del program.owner(graph).get_submodule(path)._modules[last]
    graph.erase_node(own)
    program.touch()


def settle_float_summands(program: Program) -> None:
    """Let adds write over their summand where that is not observable: it is memory of its own, all its other uses come
    before, and none of them keeps a view of it.
    """
    for _, graph in program.graphs():
        order = {node: position for position, node in enumerate(graph.nodes)}
        makers = dict(kernels_of(program, graph))
        for node, maker in makers.items():
            if isinstance(maker, LinearSum):
                maker.keep = not _is_free(node, order, makers)


def _is_free(node: fx.Node, order: Mapping[fx.Node, int], makers: Mapping[fx.Node, Kernel]) -> bool:
    source, other = node.args
    if not isinstance(other, fx.Node) or other is source:
        return False
    own = makers.get(other)
    has_memory = own.makes_memory if own is not None else is_op(other, *HAVE_OWN_MEMORY)
    readers = [reader for reader in other.users if reader is not node]
    return has_memory and all(
        order[reader] < order[node] and (reader in makers or is_op(reader, *HAVE_OWN_MEMORY)) for reader in readers
    )
