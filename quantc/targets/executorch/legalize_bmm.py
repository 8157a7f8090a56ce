"""Legalization of batched matmuls for XNNPACK: `bmm` with one batch axis, and no scalar operands.

Attention is made of these. Every op the partitioner does not know splits the delegated subgraph and runs on slow
portable kernels. Scale and softmax between the two matmuls of attention are computed on the batched shape as well: in
the delegate a reshape is a copy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program
from quantc.ir.types import TensorType, tensor_type
from quantc.targets.executorch.view_ops import Mover, reshape_sizes

aten = torch.ops.aten

MATRIX = 2
"""The axes of a matrix."""
STACK = MATRIX + 1


def is_stack_product(node: fx.Node) -> bool:
    """True if a node is a batched matmul without broadcasting."""
    if not is_op(node, "matmul"):
        return False
    left, right = (tensor_type(argument(node, side)) for side in ("x", "y"))
    if left is None or right is None or left.rank < STACK or left.shape[:-MATRIX] != right.shape[:-MATRIX]:
        return False
    sizes = (*left.shape[-MATRIX:], *right.shape[-MATRIX:])
    return left.rank == right.rank and all(isinstance(size, int) for size in sizes)


def flatten_batch_axes(program: Program, node: fx.Node) -> None:
    """Flatten all batch axes into one: `bmm`."""
    kind = tensor_type(node)
    if kind is None:
        return
    sides = [argument(node, side) for side in ("x", "y")]
    if kind.rank == STACK:
        node.target, node.args, node.kwargs = aten.bmm.default, tuple(sides), {}
        return
    mover = Mover(program, node, node.name)
    made = mover.emit(aten.bmm.default, tuple(_flat(mover, side) for side in sides), _flat_type(kind))
    program.replace(node, mover.emit(aten.reshape.default, (made, reshape_sizes(kind.shape)), kind))


def _flat(mover: Mover, side: fx.Node) -> fx.Node:
    kind = tensor_type(side)
    if kind is None:
        return side
    flat = _flat_type(kind)
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


# -- shapes between products ---------------------------------------------------------------------------------------


def delay_reshapes(program: Program) -> None:
    """Sink reshapes below row-wise ops, where they cancel or merge with other reshapes."""
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            while _is_reshape(node) and (user := _row_user(node)) is not None:
                _delay(node, user)
            if _is_reshape(node) and _is_reshape(source := node.args[0]):
                node.args = (source.args[0], node.args[1])
                if tensor_type(node) == tensor_type(source.args[0]):
                    program.forward(node, source.args[0])
    program.touch()


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
