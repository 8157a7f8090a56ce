"""Decomposition of einsum into matmul."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program, Stage
from quantc.ir.types import tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.builder import Calls, Size, known_type

Label = str
"""A letter of the equation, or `.1`, `.2`, ... for what `...` stands for, counted from its end."""


class DecomposeEinsum(Pass):
    """Write an einsum of two tensors that sums over something as a (batched) matmul.

    Axes are permuted, axes with the same role are flattened into one, and the result is permuted to the equation's
    order; where nothing has to be moved, only the matmul is written. `...` and dynamic shapes are preserved. An einsum
    that is not a matmul stays as it is, and the log says why: a single operand or more than two, a diagonal (`ii`), an
    index that one operand alone sums over, an index that is broadcast, no sum at all.
    """

    name: ClassVar[str] = "decompose-einsum"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        found = [node for node in program.nodes() if is_op(node, "einsum")]
        left: list[str] = []
        for node in found:
            contraction = _read(node)
            if isinstance(contraction, str):
                left.append(f"{program.describe(node)} is left whole: {contraction}")
                continue
            result = contraction.write(Calls(program, node))
            program.forward(node, result)
        count = len(found) - len(left)
        return Outcome(count > 0, (*((f"wrote {count} as matmul",) if count else ()), *left))


@dataclass(frozen=True)
class Contraction:
    """An einsum of two tensors, with labels sorted by role."""

    x: fx.Node
    y: fx.Node
    of_x: tuple[Label, ...]
    of_y: tuple[Label, ...]
    batch: tuple[Label, ...]
    left: tuple[Label, ...]
    right: tuple[Label, ...]
    summed: tuple[Label, ...]
    result: tuple[Label, ...]

    def write(self, calls: Calls) -> fx.Node:
        made = self._batched(calls) if self.batch else self._plain(calls)
        order = (*self.batch, *self.left, *self.right)
        return calls.permute(made, [order.index(label) for label in self.result])

    def _plain(self, calls: Calls) -> fx.Node:
        """Without batch, matmul keeps all axes of `x` but the last, however many there are."""
        x = calls.merge(
            self._ordered(calls, self.x, self.of_x, (*self.left, *self.summed)), len(self.left), len(self.summed)
        )
        if len(self.right) == 1 and self.of_y == (*self.right, *self.summed) and len(self.summed) == 1:
            return calls.linear(x, self.y)
        y = calls.merge(self._ordered(calls, self.y, self.of_y, (*self.summed, *self.right)), 0, len(self.summed))
        if len(self.right) > 1:
            y = calls.merge(y, 1, len(self.right))
        made = calls.matmul(x, y)
        return self._parted(calls, made, len(self.left), self.right) if len(self.right) > 1 else made

    def _batched(self, calls: Calls) -> fx.Node:
        lead = len(self.batch)
        x = self._ordered(calls, self.x, self.of_x, (*self.batch, *self.left, *self.summed))
        x = calls.merge(x, lead + len(self.left), len(self.summed))
        x = calls.merge(x, lead, len(self.left))
        y = self._ordered(calls, self.y, self.of_y, (*self.batch, *self.summed, *self.right))
        y = calls.merge(y, lead + len(self.summed), len(self.right))
        y = calls.merge(y, lead, len(self.summed))
        made = self._parted(calls, calls.matmul(x, y), lead + 1, self.right)
        return self._parted(calls, made, lead, self.left)

    def _ordered(self, calls: Calls, node: fx.Node, labels: Sequence[Label], wanted: Sequence[Label]) -> fx.Node:
        return calls.permute(node, [labels.index(label) for label in wanted])

    def _parted(self, calls: Calls, made: fx.Node, dim: int, labels: Sequence[Label]) -> fx.Node:
        if len(labels) == 1:
            return made
        shape = [self._shape(label) for label in labels]
        sizes = [self._size(calls, label) for label in labels]
        return calls.part(made, dim, sizes, shape)

    def _shape(self, label: Label) -> Size:
        node, labels = (self.x, self.of_x) if label in self.of_x else (self.y, self.of_y)
        return known_type(node).shape[labels.index(label)]

    def _size(self, calls: Calls, label: Label) -> int | fx.Node:
        node, labels = (self.x, self.of_x) if label in self.of_x else (self.y, self.of_y)
        return calls.size(node, labels.index(label))


def _read(node: fx.Node) -> Contraction | str:
    """Contraction of an einsum, or the reason why it is not a matmul."""
    operands = argument(node, "operands")
    if len(operands) != 2:
        return f"it has {len(operands)} operands, not two"
    kinds = [tensor_type(operand) for operand in operands]
    ranks = [kind.rank for kind in kinds if kind is not None]
    if len(ranks) != 2:
        return "the types of its operands are unknown; capture with example inputs"
    if any(kind is None or kind.dtype != torch.float32 for kind in kinds):
        return "its operands are not float32"
    labels = _labels(str(argument(node, "equation")), ranks)
    if labels is None:
        return f"the equation {argument(node, 'equation')!r} does not fit its operands"
    of_x, of_y, result = labels
    if operands[0].op == "get_attr" != operands[1].op:
        # a weight is the second operand of a linear
        operands, of_x, of_y = operands[::-1], of_y, of_x
    reason = _why_not(of_x, of_y, result) or _why_not_sizes(operands, of_x, of_y)
    if reason is not None:
        return reason
    shared = [label for label in of_x if label in of_y]
    return Contraction(
        x=operands[0],
        y=operands[1],
        of_x=of_x,
        of_y=of_y,
        batch=tuple(label for label in result if label in shared),
        left=tuple(label for label in result if label not in of_y),
        right=tuple(label for label in result if label not in of_x),
        summed=tuple(label for label in shared if label not in result),
        result=result,
    )


def _labels(equation: str, ranks: Sequence[int]) -> list[tuple[Label, ...]] | None:
    """The labels of each operand and of the result, `...` written out; None if the equation does not fit."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if len(inputs) != len(ranks) or not all(
        re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", term) for term in [*inputs, result]
    ):
        return None
    extra = [rank - len(term.replace("...", "")) for term, rank in zip(inputs, ranks, strict=True)]
    if any(more < 0 or (more > 0 and "..." not in term) for term, more in zip(inputs, extra, strict=True)):
        return None
    found = [_spelled(term, more) for term, more in zip(inputs, extra, strict=True)]
    if arrow:
        return [*found, _spelled(result, max(extra))]
    letters = re.sub(r"[,.]", "", terms)
    once = tuple(letter for letter in sorted(set(letters)) if letters.count(letter) == 1)
    return [*found, (*_spelled("...", max(extra)), *once)]


def _spelled(term: str, extra: int) -> tuple[Label, ...]:
    before, dots, after = term.partition("...")
    return (*before, *(f".{number}" for number in range(extra, 0, -1) if dots), *after)


def _why_not(of_x: Sequence[Label], of_y: Sequence[Label], result: Sequence[Label]) -> str | None:
    for labels in (of_x, of_y):
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            return f"it takes the diagonal of {twice}"
    alone = next(
        (label for label in (*of_x, *of_y) if (label in of_x) != (label in of_y) and label not in result), None
    )
    if alone is not None:
        return f"it sums over {alone} of one operand alone"
    unknown = next((label for label in result if label not in of_x and label not in of_y), None)
    if unknown is not None or len(set(result)) != len(result):
        return "its result has an index that is no operand's, or one twice"
    if all(label in result for label in of_x if label in of_y):
        return "it sums over nothing, so it is a product of elements"
    return None


def _why_not_sizes(operands: Sequence[fx.Node], of_x: Sequence[Label], of_y: Sequence[Label]) -> str | None:
    x, y = (known_type(operand) for operand in operands)
    for label in of_x:
        if label not in of_y:
            continue
        left, right = x.shape[of_x.index(label)], y.shape[of_y.index(label)]
        if left != right:
            return f"{label} is {left} in one operand and {right} in the other"
    return None
