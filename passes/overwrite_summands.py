"""Residual adds in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import fx

from quantc.ir.dialect import is_op
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.targets.kernels.int8_conv import ConvSum
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_nodes import kernels_of
from quantc.targets.kernels.residual_linear import LinearSum

HAVE_OWN_MEMORY = ("add", "layer_norm")
"""Ops whose result is no view of what they read, and that keep none."""
Order = Mapping[fx.Node, int]
Kernels = Mapping[fx.Node, Kernel]


class OverwriteSummands(Pass):
    """Let kernels that add a summand write their result over it, where no other use needs it.

    The summand must be memory of its own, and not what the kernel multiplies; all its other uses must come before, and
    none of them may keep a view of it. Run it after all kernels are fused: a sum reads what its layer read, at its own
    place.
    """

    name: ClassVar[str] = "overwrite-summands"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        changed, over, sums = 0, 0, 0
        for _, graph in program.graphs():
            order = {node: position for position, node in enumerate(graph.nodes)}
            kernels = dict(kernels_of(program, graph))
            for node, kernel in kernels.items():
                if not isinstance(kernel, ConvSum | LinearSum):
                    continue
                is_free = _is_free_byte if isinstance(kernel, ConvSum) else _is_free_float
                keep = not is_free(node, order, kernels)
                changed += kernel.keep != keep
                kernel.keep = keep
                over, sums = over + (not keep), sums + 1
        return Outcome(changed > 0, (f"{over} of {sums} sums are written over their summand",) if changed else ())


def _is_free_byte(node: fx.Node, order: Order, kernels: Kernels) -> bool:
    """True if a kernel made the 8-bit summand, and only kernels read it, none of them later."""
    source, other = node.args
    if not isinstance(other, fx.Node) or other is source or other not in kernels:
        return False
    return all(reader in kernels and order[reader] <= order[node] for reader in other.users)


def _is_free_float(node: fx.Node, order: Order, kernels: Kernels) -> bool:
    """Likewise for floats, which some ATen ops may have made or read too."""
    source, other = node.args
    if not isinstance(other, fx.Node) or other is source:
        return False
    own = kernels.get(other)
    has_memory = own.makes_memory if own is not None else is_op(other, *HAVE_OWN_MEMORY)
    readers = [reader for reader in other.users if reader is not node]
    return has_memory and all(
        order[reader] < order[node] and (reader in kernels or is_op(reader, *HAVE_OWN_MEMORY)) for reader in readers
    )
