"""Finds the streams of a program and rotates them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from quantc.ir.dialect import argument, is_op
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program
from quantc.recover.constant_edits import Edits, Journal, Tied, added, filled, rotated, scaled
from quantc.recover.coordinates import NONE, Coordinates, NotAVectorError
from quantc.recover.example_run import ExampleRun
from quantc.recover.float_check import FloatCheck
from quantc.recover.gains import PRODUCTS, Fold, fold_of, line_of
from quantc.recover.orthogonal import rotation
from quantc.recover.stream import CannotRotateError, Stream, Use
from quantc.recover.stream_rules import carry

LEAST = 4
"""The fewest components of a vector: a rotation of fewer spreads nothing."""


def rotate_streams(program: Program, seed: int, tied: Tied) -> list[Judgment]:
    """Rotate every stream that can be, and say of each what became of it."""
    run = ExampleRun.of(program)
    if isinstance(run, str):
        return [Judgment(program.name, "refused", reason=run)]
    check = FloatCheck.of(program, seed)
    judgments: list[Judgment] = []
    journals: list[tuple[int, Journal]] = []
    seen: dict[fx.Node, Coordinates | None] = {}
    for tensor, axis, is_input in _seeds(program, run):
        places = _places(run, seen, tensor, axis, is_input)
        if int(places.sum()) < LEAST:
            continue
        found: dict[fx.Node, Coordinates] = {}
        try:
            stream = stream_of(program, run, tensor, axis, places, found)
            journals.append((len(judgments), _rotate(stream, seed + len(journals), tied)))
        except CannotRotateError as error:
            seen |= dict.fromkeys((tensor, *found))
            if is_input:
                judgments.append(Judgment(str(program.site(tensor)), "refused", reason=str(error)))
        else:
            seen |= found
            judgments.append(Judgment(str(program.site(tensor)), "kept", reason=_summary(stream)))
    while journals and (change := check.gap()) is not None:
        index, journal = journals.pop()
        journal.undo()
        judgments[index] = Judgment(judgments[index].site, "undone", reason=f"an output {change}")
    return judgments


def _places(
    run: ExampleRun, seen: dict[fx.Node, Coordinates | None], tensor: fx.Node, axis: int, is_input: bool
) -> Tensor:
    """The places along an axis that no stream has yet. What a product reads is one thing, and rotated as a whole."""
    every = torch.ones(run.shapes[tensor][axis], dtype=torch.bool)
    if tensor not in seen:
        return every
    known = seen[tensor]
    if is_input or known is None or known.axis != axis % known.rank:
        return ~every
    return known.line == NONE


def stream_of(
    program: Program, run: ExampleRun, seed: fx.Node, axis: int, places: Tensor, found: dict[fx.Node, Coordinates]
) -> Stream:
    """The stream of the tensor that a node yields; `found` takes its tensors. CannotRotateError if it does not end in
    constants."""
    rank = len(run.shapes[seed])
    width = int(places.sum())
    while width >= LEAST:
        found.clear()
        stream = Stream(program, run, found)
        try:
            stream.join(seed, Coordinates.on(rank, axis, places, width), seed)
            for node in stream.pending():
                carry(stream, node)
            return stream
        except NotAVectorError as error:
            if error.width >= width or width % error.width:
                break
            width = error.width
    raise CannotRotateError(f"its vectors are cut into parts of less than {LEAST}")


def _seeds(program: Program, run: ExampleRun) -> Iterator[tuple[fx.Node, int, bool]]:
    """What products with constants read, with the axis of the channels; then what they yield."""
    found = [node for node in program.graph.nodes if is_op(node, *PRODUCTS) and node in run.floats]
    products = [node for node in found if _weight(node).op == "get_attr"]
    yield from (
        (argument(node, "x"), _channel(node, run), True) for node in products if argument(node, "x") in run.floats
    )
    yield from ((node, _channel(node, run), False) for node in products)


def _weight(node: fx.Node) -> fx.Node:
    found = argument(node, "y" if is_op(node, "matmul", "addmm") else "w")
    return found if isinstance(found, fx.Node) else node


def _channel(node: fx.Node, run: ExampleRun) -> int:
    return (
        -1 if is_op(node, "linear", "matmul", "addmm") else len(run.shapes[node]) - len(run.shapes[_weight(node)]) + 1
    )


def _summary(stream: Stream) -> str:
    width = next(iter(stream.tensors.values())).width
    gains = f", {len(stream.gains)} gains folded" if stream.gains else ""
    return f"vectors of {width}: {len(stream.tensors)} tensors, {len(stream.constants)} constants{gains}"


@torch.no_grad()
def _rotate(stream: Stream, seed: int, tied: Tied) -> Journal:
    folds = [fold_of(stream, node, constant) for node, constant in stream.gains.items()]
    edits = Edits(stream.program)
    missing: list[tuple[Use, Tensor]] = []
    for fold in folds:
        missing += _fold(stream, fold, edits)
    width = next(iter(stream.tensors.values())).width
    matrix = rotation(width, seed)
    for use, found in stream.constants.items():
        edits.add(use, rotated(stream.axis(found), found.vectors(), matrix))
    journal = edits.carry_out(tied)
    for use, values in missing:
        _give_bias(stream, use, values, matrix, journal)
    stream.program.touch()
    return journal


def _fold(stream: Stream, fold: Fold, edits: Edits) -> list[tuple[Use, Tensor]]:
    """Ask for the edits that move a gain; returns the weights whose op has no bias yet, with what it is to be."""
    missing: list[tuple[Use, Tensor]] = []
    edits.add(fold.gain, filled(1.0))
    if fold.offset is not None and fold.added is not None:
        edits.add(fold.offset, filled(0.0))
    for use, found in fold.takers.items():
        axis = stream.axis(found)
        if fold.added is not None:
            values = _product(stream, use, axis, found, fold.added)
            bias = argument(use.user, "b")
            if isinstance(bias, fx.Node):
                edits.add(Use(use.user, bias, "b"), added(values))
            else:
                missing.append((use, values))
        edits.add(use, scaled(axis, line_of(fold.values, found)))
    return missing


def _product(stream: Stream, use: Use, axis: int, found: Coordinates, offset: Tensor) -> Tensor:
    """The result of a product for a constant input."""
    weight = stream.constant(use.constant)
    if weight is None:
        raise CannotRotateError(f"{use.constant.target} is no constant")
    ids = found.line
    line = torch.where(ids < 0, 0.0, offset[(ids % found.width).clamp(min=0)])
    rows = weight.detach().double().movedim(axis, -1) @ line
    return rows.reshape(rows.shape[0], -1).sum(1)


def _give_bias(stream: Stream, use: Use, values: Tensor, matrix: Tensor, journal: Journal) -> None:
    if (out := stream.tensors.get(use.user)) is not None:
        values = rotated(0, out.vectors(), matrix).apply(values)
    bias = journal.give_bias(use.user, values.numel(), use.constant)
    tensor = stream.program.tensor(bias)
    if tensor is not None:
        tensor.copy_(values)
