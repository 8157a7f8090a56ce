"""Memory formats: which results lie in memory as kernels make them, and which as the model's do."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.ir.program import Program, Stage
from quantc.ir.types import type_of
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.targets.kernels.kernel_nodes import BY_MEMORY, is_image, is_read_in_order, kernel_of, kernels_of

CONTIGUOUS: Any = torch.ops.aten.contiguous.default


class AssignMemoryFormat(Pass):
    """Let kernels pass images on as they make them, channels last, and give results as the model does.

    A kernel whose readers take any memory format need not put its result in order. Results of the program, and what
    ops that depend on strides read, are put in order: contiguous tensors, and views of such.
    """

    name: ClassVar[str] = "assign-memory-format"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        orders = {
            node: is_read_in_order(program, node)
            for _, graph in program.graphs()
            for node, _ in kernels_of(program, graph)
        }
        copied = _put_in_order(program, orders)
        changed = 0
        for node, in_order in orders.items():
            kernel = kernel_of(program, node)
            if kernel is not None and kernel.in_order != in_order:
                kernel.in_order = in_order
                changed += 1
        free = sum(not in_order for in_order in orders.values())
        notes = (
            *((f"{free} of {len(orders)} kernels yield any memory format",) if changed else ()),
            *((f"{copied} tensors put in order",) if copied else ()),
        )
        return Outcome(bool(notes), notes)


def _put_in_order(program: Program, orders: dict[fx.Node, bool]) -> int:
    """Restore the model's memory format for outputs and for ops that depend on strides; the number of copies. ATen ops
    propagate the one that kernels yield. Kernels that do it themselves are noted in `orders`.
    """
    copied = 0
    for _, graph in program.graphs():
        for node in [node for node in graph.nodes if node.target in BY_MEMORY or node.op == "output"]:
            # only the first argument's memory matters; sizes may be nodes too
            for source in node.all_input_nodes if node.op == "output" else node.all_input_nodes[:1]:
                if node.op == "output" and (below := _below_kernel(program, source)) is not None:
                    copied += _keep_views(program, source, below, orders)
                    continue
                reader, whole = (node, source) if node.target in BY_MEMORY else _below_views(node, source)
                if not (is_image(whole) or is_image(source) or node.target in BY_MEMORY):
                    continue
                if whole.op == "call_function" or (whole.op == "call_module" and reader is not node):
                    copied += _copy(program, whole, reader)
    return copied


def _copy(program: Program, whole: fx.Node, reader: fx.Node) -> bool:
    """Have a node read a tensor in order; whether that is new."""
    if whole.target is CONTIGUOUS:
        return False
    made = program.emit(CONTIGUOUS, (whole,), before=reader, like=whole, value=type_of(whole))
    reader.replace_input_with(whole, made)
    return True


def _below_kernel(program: Program, result: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """For a kernel that yields a result and keeps the order of what it reads, if that is a view: the tensor below the
    views, and who reads it there.
    """
    kernel = kernel_of(program, result)
    source = result.args[0] if result.args else None
    if kernel is None or not kernel.keeps_order or not isinstance(source, fx.Node):
        return None
    reader, whole = _below_views(result, source)
    return None if reader is result else (reader, whole)


def _keep_views(program: Program, result: fx.Node, below: tuple[fx.Node, fx.Node], orders: dict[fx.Node, bool]) -> int:
    """Make a kernel that yields a result preserve the views of its input, as its op would: the tensor below the views
    is made contiguous, not the result. The number of copies.
    """
    reader, whole = below
    orders[result] = False
    if kernel_of(program, whole) is not None:
        orders[whole] = True
        return 0
    return _copy(program, whole, reader) if whole.op == "call_function" else 0


def _below_views(reader: fx.Node, source: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The tensor that a result is a view of, and who reads it there: the result itself where it is none."""
    while (
        isinstance(source.target, OpOverload)
        and source.target.is_view
        and source.target is not CONTIGUOUS
        and isinstance(source.args[0], fx.Node)
    ):
        reader, source = source, source.args[0]
    return reader, source
