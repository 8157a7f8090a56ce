"""Legalization of batched matmuls for XNNPACK."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import fx

from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.builder import known_type
from quantc.targets.executorch.view_ops import Mover, reshape_sizes

aten = torch.ops.aten

MATRIX = 2
"""The axes of a matrix."""
STACK = MATRIX + 1


class LegalizeBmm(Pass):
    """Write batched matmuls as `bmm` with one batch axis, numbers beside tensors as tensors, and reshapes last.

    Attention is made of these. Every op that XNNPACK's partitioner does not know ends a piece that the delegate runs.
    Scale and softmax between the two products of attention are computed on the batched shape as well: in the delegate a
    reshape is a copy, so that it moves below ops on rows, to where it meets another and both go. A product that
    broadcasts, or whose matrices have sizes that vary, stays as it is.
    """

    name: ClassVar[str] = "legalize-bmm"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        products = [node for node in program.nodes() if is_stack_product(node)]
        for node in products:
            flatten_batch_axes(program, node)
        numbers = [node for node in program.nodes() if has_number(node)]
        for node in numbers:
            with_tensor(program, node)
        moved = delay_reshapes(program)
        counts = {"products written as bmm": len(products), "numbers written as tensors": len(numbers)}
        notes = tuple(f"{count} {what}" for what, count in counts.items() if count)
        return Outcome(bool(notes) or moved, (*notes, *(("reshapes moved below ops on rows",) if moved else ())))


def is_stack_product(node: fx.Node) -> bool:
    """True if a node is a batched matmul without broadcasting."""
    if not is_op(node, "matmul"):
        return False
    left, right = (tensor_type(argument(node, side)) for side in ("x", "y"))
    if (
        left is None
        or right is None
        or tensor_type(node) is None
        or left.rank < STACK
        or left.shape[:-MATRIX] != right.shape[:-MATRIX]
    ):
        return False
    sizes = (*left.shape[-MATRIX:], *right.shape[-MATRIX:])
    return left.rank == right.rank and all(isinstance(size, int) for size in sizes)


def flatten_batch_axes(program: Program, node: fx.Node) -> None:
    """Flatten all batch axes into one: `bmm`."""
    kind = known_type(node)
    sides = [argument(node, side) for side in ("x", "y")]
    if kind.rank == STACK:
        node.target, node.args, node.kwargs = aten.bmm.default, tuple(sides), {}
        program.touch()
        return
    mover = Mover(program, node, node.name)
    made = mover.emit(aten.bmm.default, tuple(_flat(mover, side) for side in sides), _flat_type(kind))
    program.replace(node, mover.emit(aten.reshape.default, (made, reshape_sizes(kind.shape)), kind))


def _flat(mover: Mover, side: fx.Node) -> fx.Node:
    flat = _flat_type(known_type(side))
    return mover.move(side, aten.reshape.default, (reshape_sizes(flat.shape),), flat)


def _flat_type(kind: TensorType) -> TensorType:
    lead = kind.shape[:-MATRIX]
    is_known = all(isinstance(size, int) for size in lead)
    count = math.prod(map(int, lead)) if is_known else "*".join(map(str, lead))
    return TensorType(kind.dtype, (count, *kind.shape[-MATRIX:]))


# -- numbers -------------------------------------------------------------------------------------------------------

SIDES = ("x", "y")
ELEMENTWISE = ("add", "sub", "mul", "div")


def has_number(node: fx.Node) -> bool:
    """True if a node combines a float tensor with a scalar, which the exporter would turn into a rank-0 tensor."""
    if not is_op(node, *ELEMENTWISE) or (is_op(node, "add", "sub") and argument(node, "alpha") != 1):
        return False
    kind = tensor_type(node)
    numbers = [side for side in SIDES if type(argument(node, side)) in (int, float)]
    return kind is not None and kind.dtype is torch.float32 and kind.rank > 0 and len(numbers) == 1


def with_tensor(program: Program, node: fx.Node) -> None:
    """Replace the scalar by a tensor of one element."""
    sides = [argument(node, side) for side in SIDES]
    for place, side in enumerate(sides):
        if not isinstance(side, fx.Node):
            sides[place] = program.constant(f"number_of_{node.name}", torch.tensor([float(side)]), before=node)
    node.args, node.kwargs = tuple(sides), {}
    program.touch()


# -- shapes between products ---------------------------------------------------------------------------------------


def delay_reshapes(program: Program) -> bool:
    """Sink reshapes below row-wise ops, where they cancel or merge with other reshapes; whether any moved."""
    moved = False
    while any(_sink_reshapes(program, graph) for _, graph in program.graphs()):
        moved = True
    return moved


def _sink_reshapes(program: Program, graph: fx.Graph) -> bool:
    """One walk; whether it changed anything: a reshape may be read by one op less, and sink in the next."""
    moved = False
    for node in list(graph.nodes):
        if node._erased or not _is_reshape(node):
            continue
        while (user := _row_user(node)) is not None:
            _delay(node, user)
            moved = True
        if not _is_reshape(source := node.args[0]):
            continue
        node.args, moved = (source.args[0], node.args[1]), True
        if tensor_type(node) is not None and tensor_type(node) == tensor_type(source.args[0]):
            program.forward(node, source.args[0])
        if not source.users:
            program.erase(source)
    if moved:
        program.touch()
    return moved


def _is_reshape(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.reshape.default


def _row_user(node: fx.Node) -> fx.Node | None:
    """The one op that reads a reshape of stacks, if it does the same to every row of them."""
    before, after = tensor_type(node.args[0]), tensor_type(node)
    if before is None or after is None or before.shape[-1:] != after.shape[-1:] or len(node.users) != 1:
        return None
    (user,) = node.users
    if is_op(user, "softmax"):
        return user if argument(user, "dim") in (-1, after.rank - 1) and argument(user, "dtype") is None else None
    if not is_op(user, *ELEMENTWISE):
        return None
    others = [tensor_type(source) for source in user.all_input_nodes if source is not node]
    return user if len(others) == 1 and others[0] is not None and others[0].shape == (1,) else None


def _delay(node: fx.Node, user: fx.Node) -> None:
    source: Any = node.args[0]
    before = node.meta["val"]
    user.replace_all_uses_with(node)
    user.replace_input_with(node, source)
    if is_op(user, "softmax"):
        user.args, user.kwargs = (source, -1), {}
    node.args = (user, node.args[1])
    user.meta["val"], node.meta["val"] = source.meta["val"], before
    user.append(node)
