"""How coordinates carry from one tensor of an op to the others, for ops that commute with a rotation or take it up."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, fx

from quantc.ir.dialect import BY_NAME, DROPOUTS, argument, is_op, op_name, ops_in, row_of
from quantc.ir.op_row import Family
from quantc.recover.coordinates import NONE, Coordinates
from quantc.recover.stream import MOVING, Stream, is_split

Rule = Callable[[Stream, fx.Node], None]
SHAPE_ONLY = (
    "sym_size",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.new_zeros.default",
    "aten.new_ones.default",
)
"""Ops that read no more than the shape of what they are given."""
UNIFORM = ("aten.zeros.default", "aten.ones.default", "aten.full.default", *SHAPE_ONLY[1:])
"""Ops whose results have equal elements, and so equal components."""
LENGTHS = (
    "aten.var.correction",
    "aten.std.correction",
    "aten.var.dim",
    "aten.std.dim",
    "aten.linalg_vector_norm.default",
)
"""Functions of a vector's length and mean."""


def carry(stream: Stream, node: fx.Node) -> None:
    """Take into a stream what an op connects with its tensors that are in it already. CannotRotateError if the op does
    not commute with a rotation."""
    if node.op == "output":
        stream.refuse(
            next(each for each in node.all_input_nodes if each in stream.tensors), "is a result of the program"
        )
    name = op_name(node)
    if (name in SHAPE_ONLY and node not in stream.tensors) or name in UNIFORM or is_split(node):
        return
    rule = _rules().get(name)
    if rule is None:
        stream.refuse(node, f"is no linear function of each vector: {name}")
    else:
        rule(stream, node)


def _known(stream: Stream, *values: Any) -> Coordinates | None:
    return next(
        (stream.tensors[value] for value in values if isinstance(value, fx.Node) and value in stream.tensors), None
    )


def _out_of(stream: Stream, node: fx.Node, *operands: Any) -> Coordinates:
    """The coordinates of an elementwise result, known by itself or by an operand's."""
    found = _known(stream, node)
    if found is not None:
        return found
    value = next(each for each in operands if isinstance(each, fx.Node) and each in stream.tensors)
    known, rank = stream.tensors[value], len(stream.shape(node))
    return Coordinates(known.ids.reshape([1] * (rank - known.rank) + list(known.ids.shape)), known.width)


def _operand(stream: Stream, value: fx.Node, out: Coordinates) -> Coordinates:
    rank = len(stream.shape(value))
    return out.at(rank, stream.axis(out) - out.rank + rank)


def _add(stream: Stream, node: fx.Node, *names: str) -> None:
    """Summands, or alternatives, are rotated alike. What is the same for all components is left alone, as ones are."""
    values = {name: argument(node, name) for name in names}
    out = _out_of(stream, node, *values.values())
    stream.join(node, out, node)
    for name, value in values.items():
        if isinstance(value, fx.Node) and not stream.uniform(value, out):
            stream.join(value, _operand(stream, value, out), node, name)


def _sum(stream: Stream, node: fx.Node) -> None:
    _add(stream, node, "x", "y")


def _where(stream: Stream, node: fx.Node) -> None:
    condition, values = ("condition", ("x", "y")) if is_op(node, "where") else ("mask", ("x",))
    out = _out_of(stream, node, *(argument(node, name) for name in values))
    if not stream.uniform(argument(node, condition), out):
        stream.refuse(node, "chooses component by component")
    _add(stream, node, *values)


def _unary(stream: Stream, node: fx.Node) -> None:
    x = argument(node, "x")
    if is_op(node, *DROPOUTS) and argument(node, "train"):
        stream.refuse(node, "drops components")
    out = _out_of(stream, node, x)
    stream.join(node, out, node)
    stream.join(x, out, node, "x")


def _product(stream: Stream, node: fx.Node) -> None:
    """A factor is the same for all components; if it is a constant that is not, it is the gain of a norm."""
    x, y = argument(node, "x"), argument(node, "y")
    if x is y:
        _square(stream, node)
        return
    out = _out_of(stream, node, x, y)
    own = [value for value in (x, y) if isinstance(value, fx.Node) and not stream.uniform(value, out)]
    vectors = [value for value in own if value.op != "get_attr"]
    if len(vectors) != 1 or (is_op(node, "div") and y in own):
        stream.refuse(node, "multiplies component by component")
    if len(own) == 2:
        gain = next(value for value in own if value.op == "get_attr")
        stream.gains[node] = gain
    stream.join(node, out, node)
    stream.join(vectors[0], _operand(stream, vectors[0], out), node)


def _square(stream: Stream, node: fx.Node) -> None:
    """Squares are no vector, but their sum is that of the rotated vector's."""
    x = argument(node, "x")
    if node in stream.tensors:
        stream.refuse(node, "squares component by component")
    if is_op(node, "pow") and argument(node, "exponent") != 2:
        stream.refuse(node, f"is no linear function of each vector: {op_name(node)}")
    found, pending = stream.tensors[x], list(node.users)
    for user in pending:
        if is_op(user, "cast"):
            pending += user.users
        elif not is_op(user, "mean", "sum") or not _covers(stream, user, found, stream.shape(x)):
            stream.refuse(node, f"is read component by component, by {user.name}")


def _covers(stream: Stream, node: fx.Node, found: Coordinates, shape: Any) -> bool:
    """True if a reduction is over whole vectors, and nothing else on their axis."""
    dims = argument(node, "dim")
    dims = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims or range(len(shape))
    return stream.axis(found) in [dim % len(shape) for dim in dims] and found.is_full


def _reduce(stream: Stream, node: fx.Node) -> None:
    x = argument(node, "x")
    shape = stream.shape(x)
    dims = argument(node, "dim")
    dims = sorted(dim % len(shape) for dim in (dims or range(len(shape))))
    known = _known(stream, x)
    if known is not None and stream.axis(known) in dims:
        if not known.is_full:
            stream.refuse(node, "adds up vectors and something else")
        return
    if known is None:
        ids = stream.tensors[node].ids
        if not argument(node, "keepdim"):
            for dim in dims:
                ids = ids.unsqueeze(dim)
        stream.join(x, Coordinates(ids, stream.tensors[node].width), node)
        return
    axis = stream.axis(known)
    kept = bool(argument(node, "keepdim"))
    rank = len(shape) - (0 if kept else len(dims))
    stream.join(node, known.at(rank, axis if kept else axis - sum(dim < axis for dim in dims)), node)


def _length(stream: Stream, node: fx.Node) -> None:
    x = argument(node, "self")
    known = _known(stream, x)
    if known is None or not _covers_only(stream, node, known, stream.shape(x)):
        stream.refuse(node, "is no function of each vector's length")


def _covers_only(stream: Stream, node: fx.Node, found: Coordinates, shape: Any) -> bool:
    dims = argument(node, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    if op_name(node).startswith("aten.linalg") and argument(node, "ord") != 2:
        return False
    return [dim % len(shape) for dim in dims] == [stream.axis(found)] and found.is_full


def _norm(stream: Stream, node: fx.Node) -> None:
    """A norm over whole vectors commutes with a rotation that leaves the mean alone, but for its gain."""
    x, gain = argument(node, "x"), argument(node, "w")
    found = _known(stream, x, node)
    if found is None:
        return
    if len(argument(node, "normalized_shape")) != 1 or stream.axis(found) != found.rank - 1 or not found.is_full:
        stream.refuse(node, "normalizes over other axes than the vectors'")
    stream.join(x, found, node)
    stream.join(node, found, node)
    if isinstance(gain, fx.Node):
        _norm_gain(stream, node, gain)
    if is_op(node, "layer_norm") and argument(node, "b") is not None:
        stream.join(argument(node, "b"), found.at(1, 0), node, "b")


def _norm_gain(stream: Stream, node: fx.Node, gain: fx.Node) -> None:
    value = stream.constant(gain)
    if value is None:
        stream.refuse(node, "has a gain that is no constant")
    elif not bool((value == value[0]).all()):
        stream.gains[node] = gain


def _matrix(stream: Stream, node: fx.Node) -> None:
    """Rows of `x` times columns of `y`: what is contracted is rotated on both sides, the rest on the result."""
    second = "w" if is_op(node, "linear") else "y"
    x, y = argument(node, "x"), argument(node, second)
    ranks = len(stream.shape(x)), len(stream.shape(y))
    if min(ranks) < 2:
        stream.refuse(node, "multiplies by a vector")
    inner, outer = (-1, -2) if is_op(node, "linear") else (-2, -1)
    rank = len(stream.shape(node))
    if (known := _known(stream, x)) is not None:
        place = stream.axis(known) - ranks[0]
        if place == -1:
            stream.join(y, known.at(ranks[1], ranks[1] + inner), node, second)
        else:
            _check_row(stream, node, place, ranks[1])
            stream.join(node, known.at(rank, rank + place), node)
    if (known := _known(stream, y)) is not None:
        place = stream.axis(known) - ranks[1]
        if place == inner:
            stream.join(x, known.at(ranks[0], ranks[0] - 1), node, "x")
        elif place == outer:
            stream.join(node, known.at(rank, rank - 1), node)
        else:
            stream.refuse(node, "multiplies vectors of its own with each")
    if (out := _known(stream, node)) is not None:
        _matrix_back(stream, node, out, second, outer)


def _check_row(stream: Stream, node: fx.Node, place: int, other_rank: int) -> None:
    if place < -2 and other_rank > 2:
        stream.refuse(node, "multiplies vectors of its own with each")


def _matrix_back(stream: Stream, node: fx.Node, out: Coordinates, second: str, outer: int) -> None:
    """From the result of a product to its operands."""
    x, y = argument(node, "x"), argument(node, second)
    ranks = len(stream.shape(x)), len(stream.shape(y))
    bias = argument(node, "b") if is_op(node, "linear", "addmm") else None
    place = stream.axis(out) - out.rank
    if place == -1:
        stream.join(y, out.at(ranks[1], ranks[1] + outer), node, second)
        if isinstance(bias, fx.Node):
            own = len(stream.shape(bias))
            stream.join(bias, out.at(own, own - 1), node, "b")
    elif ranks[0] + place < 0 or bias is not None:
        stream.refuse(node, "makes vectors that lie along its rows of something else")
    else:
        _check_row(stream, node, place, ranks[1])
        stream.join(x, out.at(ranks[0], ranks[0] + place), node, "x")


def _conv(stream: Stream, node: fx.Node) -> None:
    x, w, b = (argument(node, name) for name in ("x", "w", "b"))
    turned = op_name(node).startswith("conv_transpose")
    known, rank = _known(stream, x), len(stream.shape(w))
    channel = len(stream.shape(x)) - rank + 1
    if known is not None:
        if stream.axis(known) != channel or argument(node, "groups") != 1:
            stream.refuse(node, "reads vectors that do not lie along its channels")
        stream.join(w, known.at(rank, 0 if turned else 1), node, "w")
    if (out := _known(stream, node)) is not None:
        if stream.axis(out) != channel or argument(node, "groups") != 1:
            stream.refuse(node, "yields vectors that do not lie along its channels")
        stream.join(w, out.at(rank, 1 if turned else 0), node, "w")
        if b is not None:
            stream.join(b, out.at(1, 0), node, "b")


def _pool(stream: Stream, node: fx.Node) -> None:
    """Means over other axes."""
    x = argument(node, "x")
    found = _known(stream, x, node)
    row = row_of(node)
    if found is None or row is None or stream.axis(found) >= found.rank - (row.spatial or 0):
        stream.refuse(node, "averages components")
    else:
        stream.join(x, found, node)
        stream.join(node, found, node)


def _lookup(stream: Stream, node: fx.Node) -> None:
    out = _known(stream, node)
    if out is None or stream.axis(out) != out.rank - 1:
        stream.refuse(node, "looks up vectors that do not lie along its rows")
    else:
        stream.join(argument(node, "w"), out.at(2, 1), node, "w")


def _attention(stream: Stream, node: fx.Node) -> None:
    q, k, v = (argument(node, name) for name in ("q", "k", "v"))
    if float(argument(node, "dropout_p")):
        stream.refuse(node, "drops components")
    if (found := _known(stream, q, k)) is not None:
        for value, role in ((q, "q"), (k, "k")):
            _last(stream, node, found)
            stream.join(value, found.at(len(stream.shape(value)), len(stream.shape(value)) - 1), node, role)
    if (found := _known(stream, v, node)) is not None:
        _last(stream, node, found)
        for value in (v, node):
            stream.join(value, found.at(len(stream.shape(value)), len(stream.shape(value)) - 1), node, "v")


def _last(stream: Stream, node: fx.Node, found: Coordinates) -> None:
    if stream.axis(found) != found.rank - 1:
        stream.refuse(node, "attends with vectors that do not lie along the last axis")


def _join(stream: Stream, node: fx.Node) -> None:
    """Vectors one after the other, or side by side."""
    values = argument(node, "xs")
    shape = stream.shape(node)
    dim = int(argument(node, "dim")) % len(shape)
    is_new = is_op(node, "stack")
    for index, value in enumerate(values):
        known = _known(stream, value)
        if known is None:
            continue
        ids = known.ids.unsqueeze(dim) if is_new else known.ids
        if ids.shape[dim] > 1:  # side by side: the part that this one yields
            start = sum(stream.shape(each)[dim] for each in values[:index])
            whole = ids.new_full([*ids.shape[:dim], shape[dim], *ids.shape[dim + 1 :]], NONE)
            whole.narrow(dim, start, ids.shape[dim]).copy_(ids)
            ids = whole
        stream.join(node, Coordinates(ids, known.width), node)
    out = _known(stream, node)
    if out is None:
        return
    start = 0
    for index, value in enumerate(values):
        size = 1 if is_new else stream.shape(value)[dim]
        ids = out.ids if out.ids.shape[dim] == 1 else out.ids.narrow(dim, start, size)
        start += size
        if bool((ids != NONE).any()):
            part = Coordinates.of(ids, out.width)
            stream.join(value, Coordinates(part.ids.squeeze(dim), out.width) if is_new else part, node, f"xs{index}")


def _pad(stream: Stream, node: fx.Node) -> None:
    x = argument(node, "x")
    found = _known(stream, x, node)
    sizes = argument(node, "pad")
    if found is None or any(sizes[2 * (found.rank - 1 - stream.axis(found)) :][:2]):
        stream.refuse(node, "pads vectors")
    else:
        stream.join(x, found, node)
        stream.join(node, found, node)


def _move(stream: Stream, node: fx.Node) -> None:
    """Carry out the op on coordinates; it moves elements and does nothing else."""
    call = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or (node.target is operator.getitem and not is_split(call)):
        stream.refuse(node, "takes a part of something that is no split")
        return
    row = row_of(call)
    x = argument(call, row.operands[0] if row is not None else "self")
    if not isinstance(x, fx.Node):
        return
    known = _known(stream, x)
    try:
        move = _mover(stream, node, call, x)
        if known is not None and (moved := known.moved(move, stream.shape(x))) is not None:
            stream.join(node, moved, node)
        if (out := _known(stream, node)) is not None:
            known = out.moved_back(move, stream.shape(x), stream.shape(node))
            stream.join(x, known, call, row.operands[0] if row is not None else "self")
    except KeyError as error:
        stream.refuse(node, f"moves elements to where {error} says")
    if known is not None and any(known.ids.shape[axis] > 1 for axis in _chosen(call, known.rank)):
        stream.refuse(node, "chooses components by the data")


def _chosen(node: fx.Node, rank: int) -> list[int]:
    """The axes along which an op picks elements by indices that it is given at run time."""
    if is_op(node, "index"):
        given = dict(enumerate(argument(node, "indices")))
    elif is_op(node, "index_select", "gather"):
        given = {int(argument(node, "dim")) % rank: argument(node, "index")}
    else:
        return []
    return [axis for axis, index in given.items() if isinstance(index, fx.Node) and index.op != "get_attr"]


def _mover(stream: Stream, node: fx.Node, call: fx.Node, x: fx.Node) -> Callable[[Tensor], Tensor]:
    def move(ids: Tensor) -> Tensor:
        found = stream.run.repeat(call, x, ids)
        return found if call is node else found[node.args[1]]  # type: ignore[no-any-return]

    return move


@cache
def _rules() -> dict[str, Rule]:
    found: dict[str, Rule] = dict.fromkeys(MOVING, _move)
    found |= {name: _conv for name, op in BY_NAME.items() if op.family in (Family.CONV, Family.CONV_TRANSPOSE)}
    found |= {name: _unary for name, op in BY_NAME.items() if op.family is Family.DROPOUT}
    found |= dict.fromkeys(ops_in(Family.AVERAGE_POOL, Family.ADAPTIVE_POOL), _pool)
    found |= dict.fromkeys(("neg", "cast", "aten.alias.default"), _unary)
    found |= dict.fromkeys(("add", "sub"), _sum)
    found |= dict.fromkeys(("where", "masked_fill"), _where)
    found |= dict.fromkeys(("mul", "div"), _product)
    found |= dict.fromkeys(("layer_norm", "rms_norm"), _norm)
    found |= dict.fromkeys(("linear", "matmul", "addmm"), _matrix)
    found |= dict.fromkeys(("mean", "sum"), _reduce)
    found |= dict.fromkeys(("cat", "stack"), _join)
    found |= dict.fromkeys(LENGTHS, _length)
    found |= {"pow": _square, "embedding": _lookup, "sdpa": _attention, "pad": _pad, "operator:getitem": _move}
    return found


__all__ = ["carry"]
