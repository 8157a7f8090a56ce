"""Gains of norms, and other constant factors of components, folded into the constants beyond them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from quantc.ir.dialect import DROPOUTS, WEIGHTED, argument, is_op, row_of
from quantc.ir.op_row import MOVES
from quantc.recover.coordinates import Coordinates
from quantc.recover.stream import CannotRotateError, Stream, Use
from quantc.recover.stream_rules import carry

PRODUCTS = (*WEIGHTED, "matmul", "addmm")
WITH_BIAS = ("linear", "addmm", "conv1d", "conv2d", "conv3d")


@dataclass(frozen=True, eq=False)
class Fold:
    """A gain, and perhaps an offset, with the constants that take them up."""

    node: fx.Node
    gain: Use
    values: Tensor
    """By component, float64."""
    takers: dict[Use, Coordinates]
    """Weights, with the channels that are multiplied by the gain."""
    offset: Use | None = None
    added: Tensor | None = None


def fold_of(stream: Stream, node: fx.Node, constant: fx.Node) -> Fold:
    """Where the gain of an op can go: into what reads its result, or into what makes its input. CannotRotateError if
    neither can take it."""
    tensor = stream.constant(constant)
    if tensor is None:
        raise CannotRotateError(f"{stream.program.describe(node)} has a gain that is no constant")
    out = stream.tensors[node]
    values = tensor.detach().double().reshape(-1)
    if values.numel() != stream.shape(node)[stream.axis(out)]:
        raise CannotRotateError(f"{stream.program.describe(node)} has gains that differ along other axes")
    gain = Use(node, constant, "w" if is_op(node, "layer_norm", "rms_norm") else "y")
    try:
        return _forward(stream, node, gain, values)
    except CannotRotateError:
        if not is_op(node, "mul"):
            raise
        try:
            return Fold(node, gain, values, _writers(stream, node))
        except CannotRotateError:
            pass
        raise


def _forward(stream: Stream, node: fx.Node, gain: Use, values: Tensor) -> Fold:
    last, offset = _offset_of(stream, node)
    added = None if offset is None else stream.constant(offset.constant)
    if added is not None and not bool(added.any()):
        added = None
    may_scale = added is None
    part = _part(stream, last, lambda each: _reads(each, may_scale))
    takers = dict(part.constants)
    if added is not None:
        for use in takers:
            if not is_op(use.user, *WITH_BIAS) or any(_padding(use.user)):
                raise CannotRotateError(
                    f"{stream.program.describe(use.user)} has no bias to take up the offset of {node.name}"
                )
    return Fold(node, gain, values, takers, offset, None if added is None else added.detach().double().reshape(-1))


def _padding(node: fx.Node) -> list[int]:
    return [] if is_op(node, "linear", "addmm") else [size for size in argument(node, "padding") if size]


def _offset_of(stream: Stream, node: fx.Node) -> tuple[fx.Node, Use | None]:
    """The op that adds a constant to the result of another, and that constant."""
    if is_op(node, "layer_norm"):
        offset = argument(node, "b")
        return node, None if offset is None else Use(node, offset, "b")
    users = list(node.users)
    if len(users) == 1 and is_op(users[0], "add"):
        values = [argument(users[0], name) for name in ("x", "y")]
        other = next((value for value in values if isinstance(value, fx.Node) and value.op == "get_attr"), None)
        tensor = stream.constant(other)
        axis = stream.axis(stream.tensors[node])
        if other is not None and tensor is not None and tensor.numel() == stream.shape(node)[axis]:
            return users[0], Use(users[0], other, "y")
    return node, None


def _reads(node: fx.Node, may_scale: bool) -> bool:
    """True for ops that yield the channels that they read, or sums of them."""
    row = row_of(node)
    is_plain = (row is not None and row.family in MOVES) or is_op(node, "cast", "neg", "mean", *DROPOUTS)
    return (
        is_plain or is_op(node, *PRODUCTS) or "getitem" in str(node.target) or (may_scale and is_op(node, "mul", "div"))
    )


def _part(stream: Stream, start: fx.Node, allowed: Callable[[fx.Node], bool]) -> Stream:
    """All that reads the channels of a tensor. CannotRotateError unless that is products with constants."""
    part = Stream(stream.program, stream.run)
    shape, axis = stream.shape(start), stream.axis(stream.tensors[start])
    part.join(start, Coordinates.along(len(shape), axis, shape[axis], shape[axis]), start)
    for node in part.pending():
        if node is start or (is_op(node, "sym_size")):
            continue
        if node.op == "output" or not allowed(node):
            raise CannotRotateError(
                f"{stream.program.describe(start)} has a gain, and {'is a result' if node.op == 'output' else f'{node.name} reads it'}"
            )
        carry(part, node)
    if part.gains or not part.constants or any(use.user in part.tensors for use in part.constants):
        raise CannotRotateError(f"{stream.program.describe(start)} has a gain that nothing can take")
    return part


def _writers(stream: Stream, node: fx.Node) -> dict[Use, Coordinates]:
    """The constants that make the tensor which a gain multiplies, if nothing else reads that."""
    value = next(
        each
        for each in (argument(node, "x"), argument(node, "y"))
        if isinstance(each, fx.Node) and each.op != "get_attr"
    )
    part = Stream(stream.program, stream.run)
    shape, axis = stream.shape(value), stream.axis(stream.tensors[value])
    part.join(value, Coordinates.along(len(shape), axis, shape[axis], shape[axis]), value)
    for each in part.pending():
        if each is node or is_op(each, "sym_size"):
            continue
        if each.op == "output" or not (_reads(each, may_scale=True) or is_op(each, "embedding")):
            raise CannotRotateError(f"{stream.program.describe(node)} has a gain that {each.name} keeps from folding")
        carry(part, each)
    if part.gains or not part.constants or any(use.user not in part.tensors for use in part.constants):
        raise CannotRotateError(f"{stream.program.describe(node)} has a gain that nothing can take")
    return dict(part.constants)


def line_of(values: Tensor, at: Coordinates) -> Tensor:
    """A number for each position along an axis: that of the channel there, and 1 where there is none."""
    ids = at.line
    return torch.where(ids < 0, 1.0, values[(ids % at.width).clamp(min=0)])
