"""Fusion of residual adds into linear layers."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from quantc.ir.dialect import is_op
from quantc.ir.program import Program, Stage
from quantc.ir.types import tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.targets.kernels.int8_linear import OnOnednn
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_nodes import forget_kernel, kernels_of, tell_kernel
from quantc.targets.kernels.residual_linear import LinearSum


class FuseResidual(Pass):
    """Let linear layers on onednn add a float summand as they write, where nothing else reads their result.

    The sums of transformer branches are such. The bits are those of the two ops.
    """

    name: ClassVar[str] = "fuse-residual"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        notes: list[str] = []
        for _, graph in program.graphs():
            layers = {
                node: layer for node, kernel in kernels_of(program, graph) if (layer := _that_adds(kernel)) is not None
            }
            for node in [node for node in graph.nodes if is_op(node, "add")]:
                own = next((item for item in node.all_input_nodes if item in layers), None)
                if own is not None and _is_plain_sum(node, own):
                    notes.append(f"fused {node.name} into {program.placements.stands_for(own)}")
                    _fuse(program, node, own, layers[own])
        return Outcome(bool(notes), tuple(notes))


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


def _fuse(program: Program, node: fx.Node, own: fx.Node, layer: OnOnednn) -> None:
    other = next(item for item in node.args if item is not own)
    owner, placements = program.owner(node.graph), program.placements
    name = f"{own.target}_and_sum"
    owner.add_module(name, LinearSum.of(layer))
    tell_kernel(program, own, f"{layer.extra_repr()} + sum")
    made = program.emit(name, (own.args[0], other), before=node, like=node)
    placements.runs[made] = (*placements.keys(own), *placements.keys(node))
    placements.stand_ins[made] = placements.stands_for(node)
    program.replace(node, made)
    program.erase(own)
    forget_kernel(owner, str(own.target))
