"""Gains of norms, and other constant factors of components, folded into the constants beyond them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from quantc.ir.dialect import DROPOUTS, WEIGHTED, argument, is_op, ops_in
from quantc.ir.op_row import Family
from quantc.recover.coordinates import Coordinates, NotAVectorError
from quantc.recover.stream import CannotRotateError, Stream, Use, is_move, is_split
from quantc.recover.stream_rules import carry

PRODUCTS = (*WEIGHTED, "matmul", "addmm")
JOINS = ops_in(Family.JOIN)
SAME = ("cast", "mean", "pad", *DROPOUTS, *ops_in(Family.ADAPTIVE_POOL))
"""Ops that yield a number where all that they read is that number."""
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
    except (CannotRotateError, NotAVectorError) as error:
        why = error
    if is_op(node, "mul"):
        with suppress(CannotRotateError, NotAVectorError):
            return Fold(node, gain, values, _writers(stream, node))
    if isinstance(why, CannotRotateError):
        raise why
    raise CannotRotateError(f"{stream.program.describe(node)} has a gain, and {why}")


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
    if is_op(node, "mul", "div") or (is_op(node, "pad") and any(argument(node, "pad"))):
        return may_scale
    return is_move(node) or is_split(node) or is_op(node, *SAME, *PRODUCTS)


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
    if part.gains or not part.constants or not _is_one_sided(part, start):
        raise CannotRotateError(f"{stream.program.describe(start)} has a gain that nothing can take")
    return part


def _is_one_sided(part: Stream, start: fx.Node) -> bool:
    """True if no product contracts two tensors that the gain has multiplied, and the other side is constants alone."""
    mine = {start}
    for node in start.graph.nodes:
        if node in part.tensors and any(value in mine for value in node.all_input_nodes):
            mine.add(node)
    twice = (node for value in mine for node in value.users if is_op(node, *PRODUCTS))
    joined = (node for node in mine if is_op(node, *JOINS))
    return (
        all(value in mine or is_move(value) for value in part.tensors)
        and not any(sum(value in mine for value in node.args) > 1 for node in twice)
        and all(value in mine for node in joined for value in node.all_input_nodes)
    )


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
