"""How ops treat factors of channels: what absorbs them, what passes them on, and along which axes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import fx
from torch.fx.node import map_arg

from quantc.ir.dialect import argument, is_op, op_name, operands, row_of, writes
from quantc.ir.homogeneity import scales_too, scaling_operands, upper_bound
from quantc.ir.op_row import MOVES, Family, Op, Trait
from quantc.recover.channel_classes import Labels
from quantc.recover.channel_moves import expanded, joined, moved, reshaped
from quantc.recover.channel_walk import LARGE, Use, Walk

Rule = Callable[[Walk, fx.Node], None]


def label(walk: Walk, node: fx.Node) -> None:
    """Label what a node yields."""
    if node.op == "placeholder":
        walk.fixed(node, f"{node.name} is an input of the program")
    elif node.op == "output":
        _keep_all(walk, node, "the program returns it")
    elif node in walk.observers:
        walk.labels[node] = walk.labels[node.args[0]]  # type: ignore[index]
    elif node.target is operator.getitem and node.args[0] in walk.parts:
        walk.labels[node] = walk.parts[node.args[0]][node.args[1]]  # type: ignore[index]
    elif node.op != "get_attr":
        _call(walk, node)


def _call(walk: Walk, node: fx.Node) -> None:
    row = row_of(node)
    if row is None or writes(node.target):
        _refuse(walk, node, "of whose arithmetic nothing is known" if row is None else "which writes to its operands")
        return
    rule = _BY_NAME.get(row.name) or _BY_FAMILY.get(row.family)
    if rule is not None and not (walk.follows and Trait.ELEMENTWISE in row.traits):
        rule(walk, node)
        return
    sets = scaling_operands(node)
    if walk.follows and Trait.ELEMENTWISE in row.traits:
        _proportional(walk, node, row, row.operands)
    elif node in walk.largest and (bound := upper_bound(node)) is not None:
        _bounded(walk, node, bound)
    elif not sets:
        _refuse(walk, node, f"which is not proportional to what it reads ({_options(node)})")
    elif len(sets) > 1:
        _product(walk, node)
    else:
        _proportional(walk, node, row, next(iter(sets)))


def _options(node: fx.Node) -> str:
    """An op with its numbers: `clamp 0.0, 6.0`."""
    numbers = [f"{value}" for value in node.args[1:] if isinstance(value, int | float)]
    return " ".join([op_name(node), ", ".join(numbers)]).strip()


def _keep_all(walk: Walk, node: fx.Node, reason: str) -> None:
    def keep(value: fx.Node) -> fx.Node:
        walk.keep(value, reason)
        return value

    map_arg((node.args, node.kwargs), keep)


def _refuse(walk: Walk, node: fx.Node, why: str) -> None:
    _keep_all(walk, node, f"{walk.name(node)} reads it, {why}")
    walk.fixed(node, f"{walk.name(node)} yields it, {why}")


# -- layers ------------------------------------------------------------------------------------------------------


def _layer(walk: Walk, node: fx.Node) -> None:
    """A linear or a convolution: columns of its weight undo the factors of what it reads, rows make those of its result."""
    x, w, b = argument(node, "x"), argument(node, "w"), argument(node, "b")
    weight, rank = walk.constant(w), _rank(walk, node)
    bias = None if b is None else walk.constant(b)
    if weight is None or rank is None or (b is not None and bias is None):
        _refuse(walk, node, walk.why_no_constant(w if weight is None else b))
        return
    row = row_of(node)
    spatial = row.spatial if row is not None and row.spatial else 0
    axis = rank - 1 - spatial
    groups = int(argument(node, "groups")) if spatial else 1
    is_transposed = row is not None and row.family is Family.CONV_TRANSPOSE
    outputs = weight.shape[1] * groups if is_transposed else weight.shape[0]
    up = walk.classes.fresh((outputs,))
    down = _only_along(walk, x, axis, groups)
    walk.uses.append(Use(w, node, *_of_weight(up, down, groups, is_transposed, weight.dim(), weight.shape[0])))
    if b is not None:
        walk.uses.append(Use(b, node, up=up))
    walk.set(node, _along(up, axis, rank))


def _of_weight(
    up: Labels, down: Labels | None, groups: int, is_transposed: bool, rank: int, rows: int
) -> tuple[Labels, Labels | None]:
    """Labels of outputs and inputs in a weight's layout: by groups, outputs first; inputs first where transposed."""
    tail = (1,) * (rank - 2)
    if is_transposed:
        by_group = np.repeat(up.reshape(groups, 1, -1), rows // groups, axis=1)
        return by_group.reshape(rows, -1, *tail), None if down is None else down.reshape(-1, 1, *tail)
    if down is None:
        return up.reshape(-1, 1, *tail), None
    columns = np.repeat(down.reshape(groups, 1, -1), rows // groups, axis=1).reshape(rows, -1, *tail)
    return up.reshape(-1, 1, *tail), columns if groups > 1 else down.reshape(1, -1, *tail)


def _only_along(walk: Walk, x: Any, axis: int, groups: int) -> Labels | None:
    """The labels of an operand, one a channel; None if it has none. Along other axes they are tied."""
    if not isinstance(x, fx.Node) or x not in walk.labels:
        return None
    labels, shape = walk.labels[x], walk.shape(x)
    if shape is None:
        walk.keep(x, "its shape is not known")
        return None
    labels = walk.classes.tied(labels, [other for other in range(labels.ndim) if other != axis])
    return np.ascontiguousarray(np.broadcast_to(labels.reshape(-1), (shape[axis],)))


def _along(labels: Labels, axis: int, rank: int) -> Labels:
    shape = [1] * rank
    shape[axis] = labels.size
    return labels.reshape(shape)


def _rank(walk: Walk, node: fx.Node) -> int | None:
    shape = walk.shape(node)
    return None if shape is None else len(shape)


def _norm(walk: Walk, node: fx.Node) -> None:
    """A normalization: its gain and bias make the factors of its result."""
    rank, w = _rank(walk, node), argument(node, "w")
    b = argument(node, "b") if not is_op(node, "rms_norm") else None
    gain, bias = walk.constant(w), walk.constant(b)
    reason = f"{walk.name(node)} reads it, which normalises it"
    _keep_all(walk, node, reason)
    if gain is None or rank is None or (b is not None and bias is None):
        walk.fixed(node, f"{walk.name(node)} yields it, and {walk.why_no_constant(w)}")
        return
    labels = walk.classes.fresh(tuple(gain.shape))
    walk.uses.append(Use(w, node, up=labels))
    if b is not None:
        walk.uses.append(Use(b, node, up=labels))
    is_last = is_op(node, "layer_norm", "rms_norm")
    walk.set(node, labels.reshape((1,) * (rank - gain.dim()) + labels.shape) if is_last else _along(labels, 1, rank))


def _lookup(walk: Walk, node: fx.Node) -> None:
    """A table: its columns make the factors."""
    w, rank = argument(node, "w"), _rank(walk, node)
    table = walk.constant(w)
    if table is None or rank is None or not is_op(node, "embedding"):
        _refuse(walk, node, walk.why_no_constant(w))
        return
    up = walk.classes.fresh((table.shape[-1],))
    walk.uses.append(Use(w, node, up=up.reshape(1, -1)))
    walk.set(node, _along(up, rank - 1, rank))


# -- products ----------------------------------------------------------------------------------------------------


def _product(walk: Walk, node: fx.Node) -> None:
    """An elementwise product: a constant absorbs factors on both sides; of two tensors, one may have any."""
    x, y = argument(node, "x"), argument(node, "y")
    for one, other in ((x, y), (y, x)):
        if walk.constant(other) is not None and isinstance(one, fx.Node) and _gain(walk, node, one, other):
            return
    _carried(walk, node, x, y)


def _quotient(walk: Walk, node: fx.Node) -> None:
    x, y = argument(node, "x"), argument(node, "y")
    if walk.constant(y) is not None and isinstance(x, fx.Node) and _gain(walk, node, x, y, divides=True):
        return
    walk.keep(y, f"{walk.name(node)} divides by it")
    _carried(walk, node, x, None)


def _gain(walk: Walk, node: fx.Node, x: fx.Node, c: fx.Node, *, divides: bool = False) -> bool:
    """A factor for each element of a constant that multiplies or divides; False if it cannot undo those of `x`."""
    tensor, labels, rank = walk.constant(c), walk.labels.get(x), _rank(walk, node)
    if tensor is None or labels is None or rank is None or tensor.numel() > LARGE or labels.ndim > rank:
        return False
    shape, own = (1,) * (rank - tensor.dim()) + tuple(tensor.shape), _raised(labels, rank)
    if any(width > 1 and size == 1 for width, size in zip(own.shape, shape, strict=True)):
        return False
    out = walk.classes.fresh(shape)
    made, undone = (np.asarray(each[(0,) * (rank - tensor.dim())]) for each in (out, own))
    walk.uses.append(Use(c, node, undone, made, divides) if divides else Use(c, node, made, undone))
    walk.set(node, out)
    return True


def _raised(labels: Labels, rank: int) -> Labels:
    return labels.reshape((1,) * (rank - labels.ndim) + labels.shape)


def _carried(walk: Walk, node: fx.Node, x: Any, y: Any) -> None:
    """The result has the factors of one operand; those of the other stay."""
    rank = _rank(walk, node)
    values = [each for each in (x, y) if isinstance(each, fx.Node) and walk.is_float(each)]
    if rank is None or not values:
        _refuse(walk, node, "of which nothing is known")
        return
    found = [walk.of(each, node) for each in values]
    chosen = int(len(found) == 2 and found[0] is not None and walk.classes.is_fixed(found[0]))
    if len(found) == 2:
        walk.keep(values[1 - chosen], f"{walk.name(node)} multiplies it by {values[chosen].name}")
        other = found[1 - chosen]
        if other is not None:
            walk.classes.fix(other, f"{walk.name(node)} multiplies it by {values[chosen].name}")
    labels = found[chosen]
    if labels is None:
        walk.fixed(node, "of which nothing is known")
        return
    walk.set(node, _raised(labels, rank))


def _matmul(walk: Walk, node: fx.Node) -> None:
    """A product of matrices: a constant one undoes and makes factors like a layer; of two tensors, the columns of the second
    may have any."""
    x, y, rank = argument(node, "x"), argument(node, "y"), _rank(walk, node)
    shapes = [walk.shape(each) for each in (x, y)]
    if rank is None or any(each is None or len(each) < 2 for each in shapes):
        _refuse(walk, node, "of which not all is known")
        return
    weight = walk.constant(y)
    if weight is not None and weight.dim() == 2:
        up, down = walk.classes.fresh((weight.shape[1],)), _only_along(walk, x, rank - 1, 1)
        walk.uses.append(Use(y, node, up.reshape(1, -1), None if down is None else down.reshape(-1, 1)))
        walk.set(node, _along(up, rank - 1, rank))
        return
    walk.keep(x, f"{walk.name(node)} multiplies it by {y.name}")
    _columns(walk, node, walk.labels.get(y), rank)


def _attention(walk: Walk, node: fx.Node) -> None:
    v, rank = argument(node, "v"), _rank(walk, node)
    for value in (argument(node, name) for name in ("q", "k", "mask")):
        walk.keep(value, f"{walk.name(node)} compares it with others")
    labels, shape, own = walk.labels.get(v), walk.shape(node), walk.shape(v)
    if labels is not None and shape is not None and own is not None and len(shape) > 2 and labels.shape[-3] > 1:
        labels = np.repeat(labels, shape[-3] // own[-3], axis=-3)  # heads that share one
    _columns(walk, node, labels, rank)


def _columns(walk: Walk, node: fx.Node, labels: Labels | None, rank: int | None) -> None:
    """The factors of a second matrix, which may not vary along the axis that is summed."""
    if labels is None or rank is None:
        walk.fixed(node, f"{walk.name(node)} yields it, of which nothing is known")
        return
    walk.set(node, _raised(walk.classes.tied(labels, [labels.ndim - 2]), rank))


# -- what is proportional to its operands ------------------------------------------------------------------------


def _proportional(walk: Walk, node: fx.Node, row: Op, names: Sequence[str]) -> None:
    """An op whose result is multiplied where all its operands are."""
    rank, given = _rank(walk, node), dict(operands(node))
    values = [given[name] for name in names if name in given]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    bad = [value for value in numbers if not (walk.follows or scales_too(float(value)))]
    value = 0.0 if walk.follows or row.name != "masked_fill" else float(argument(node, "value"))
    if rank is None or bad or not scales_too(value):
        _refuse(walk, node, f"with the number {bad[0]}" if bad else "of which not all is known")
        return
    for name, value in given.items():
        if name not in names:
            _keep_all_in(walk, value, f"{walk.name(node)} reads it as {name}")
    found = _labels_of(walk, node, [value for value in values if isinstance(value, fx.Node) and walk.is_float(value)])
    if not found:
        _refuse(walk, node, "of which not all is known")
        return
    labels = _raised(found[0], rank) if len(found) > 1 else found[0]
    for other in found[1:]:
        labels = walk.classes.unite(labels, _raised(other, rank))
    _behind(walk, node, row, labels, rank)


def _labels_of(walk: Walk, node: fx.Node, values: Sequence[Any]) -> list[Labels]:
    """The labels of several operands; none if one has none."""
    found = [labels for value in values if (labels := walk.of(value, node)) is not None]
    return found if len(found) == len(values) else []


def _bounded(walk: Walk, node: fx.Node, bound: float) -> None:
    """An op with an upper bound passes on factors of channels that stay below it."""
    labels, largest = walk.of(argument(node, "x"), node), walk.largest[node].double().numpy()
    if labels is None or labels.size != largest.size:
        _refuse(walk, node, f"which is not proportional to what it reads ({_options(node)})")
        return
    own, is_met = labels.reshape(-1), largest >= bound
    walk.classes.fix(own[is_met], f"{walk.name(node)} bounds it ({_options(node)})")
    walk.limits.append((own[~is_met], bound / np.maximum(largest[~is_met], bound * 2.0**-20)))
    walk.set(node, labels)


def _keep_all_in(walk: Walk, value: Any, reason: str) -> None:
    for each in value if isinstance(value, list | tuple) else (value,):
        walk.keep(each, reason)


def _behind(walk: Walk, node: fx.Node, row: Op, labels: Labels, rank: int) -> None:
    """The labels behind an op of one operand, or of operands that are added up."""
    if row.spatial:
        labels = walk.classes.tied(labels, range(labels.ndim - row.spatial, labels.ndim))
    elif row.family in (Family.REDUCTION, Family.EXTREME):
        given = argument(node, "dim")
        axes = range(labels.ndim) if given in (None, []) else [given] if isinstance(given, int) else given
        axes = sorted({axis % labels.ndim for axis in axes})
        labels = walk.classes.tied(labels, axes)
        if not argument(node, "keepdim"):
            labels = labels.reshape([size for axis, size in enumerate(labels.shape) if axis not in axes])
    elif row.family is not Family.PAD and Trait.ELEMENTWISE not in row.traits and row.name != "prelu":
        if row.family is not Family.DROPOUT:
            _refuse(walk, node, "along whose axes nothing is known")
            return
    elif row.family is Family.PAD:
        labels = _padded(walk, node, labels)
    walk.set(node, _raised(labels, rank))


def _padded(walk: Walk, node: fx.Node, labels: Labels) -> Labels:
    """Zeros have any factor; so padded channels are new ones."""
    pad: Any = argument(node, "pad")
    for index in range(0, len(pad), 2):
        axis = labels.ndim - 1 - index // 2
        if labels.shape[axis] == 1 or not any(pad[index : index + 2]):
            continue
        if argument(node, "mode") != "constant" or min(pad[index : index + 2]) < 0:
            labels = walk.classes.tied(labels, [axis])
            continue
        sides = []
        for count in pad[index : index + 2]:
            shape = list(labels.shape)
            shape[axis] = count
            sides.append(walk.classes.fresh(shape))
        labels = np.concatenate([sides[0], labels, sides[1]], axis=axis)
    return labels


# -- moves -------------------------------------------------------------------------------------------------------


def _move(walk: Walk, node: fx.Node) -> None:
    """An op that moves elements moves their labels."""
    x = node.args[0] if node.args else None
    labels = walk.of(x, node)
    before = walk.shape(x) if isinstance(x, fx.Node) else None
    row = row_of(node)
    if labels is None or before is None or row is None or not walk.is_float(x):
        _refuse(walk, node, "of which not all is known")
        return
    after = walk.shape(node)
    if row.family is Family.VIEW and after is not None:
        walk.set(node, reshaped(labels, before, after))
        return
    if row.family is Family.COPY:
        walk.set(node, labels)
        return
    if row.name == "expand" and after is not None:
        walk.set(node, _raised(labels, len(after)))
        return
    if (arguments := _numbers(walk, node)) is None:
        _refuse(walk, node, "which moves elements by numbers that are not known")
        return
    found = moved(node.target, (expanded(labels, before), *arguments[0]), arguments[1])
    if isinstance(found, list):
        walk.parts[node] = found
    else:
        walk.set(node, found)


def _numbers(walk: Walk, node: fx.Node) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments after the first, dynamic sizes as in the example inputs; None if one is a tensor of the data."""
    unknown = False

    def known(value: fx.Node) -> Any:
        nonlocal unknown
        tensor = walk.program.tensor(value)
        if tensor is not None and not tensor.is_meta:
            return tensor
        unknown = True
        return value

    args: Any = map_arg(node.args[1:], known)
    kwargs: Any = map_arg(node.kwargs, known)
    return None if unknown else (list(args), dict(kwargs))


def _join(walk: Walk, node: fx.Node) -> None:
    values, axis = argument(node, "xs"), argument(node, "dim")
    found = _labels_of(walk, node, values)
    shapes = [shape for value in values if (shape := walk.shape(value)) is not None]
    if not isinstance(axis, int) or not found or len(shapes) < len(values):
        _refuse(walk, node, "of which not all is known")
        return
    if is_op(node, "stack"):
        axis %= len(shapes[0]) + 1
        found = [np.expand_dims(each, axis) for each in found]
        shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]
    walk.set(node, joined(found, shapes, axis))


_BY_NAME: dict[str, Rule] = {
    "linear": _layer,
    "mul": _product,
    "div": _quotient,
    "matmul": _matmul,
    "sdpa": _attention,
}
_BY_FAMILY: dict[Family, Rule] = {
    Family.CONV: _layer,
    Family.CONV_TRANSPOSE: _layer,
    Family.NORM: _norm,
    Family.LOOKUP: _lookup,
    Family.JOIN: _join,
    **dict.fromkeys(MOVES, _move),
}
