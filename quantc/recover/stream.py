"""Streams: tensors that can be rotated together, with the constants that take up the rotation.

A stream is what is connected by ops that commute with a rotation of its vectors: moves, sums, products with numbers that
are the same for all components, norms without gains. It ends in products with constants, which are rotated in turn.
Whether it is that of residuals, or of the values of one attention, makes no difference.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.dialect import op_name, ops_in, row_of
from quantc.ir.op_row import MOVES, Family
from quantc.ir.program import Program
from quantc.recover.coordinates import Coordinates
from quantc.recover.example_run import ExampleRun

MOVING = frozenset(ops_in(*MOVES, Family.JOIN, overloads=True))
"""Ops that move elements and do nothing else."""


class CannotRotateError(Exception):
    """Why a stream cannot be rotated."""


@dataclass(frozen=True, slots=True)
class Use:
    """A constant as an operand of an op, along one of its axes."""

    user: fx.Node
    constant: fx.Node
    role: str
    axis: int | None = None


@dataclass
class Stream:
    """A stream as far as it is known."""

    program: Program
    run: ExampleRun
    tensors: dict[fx.Node, Coordinates] = field(default_factory=dict)
    constants: dict[Use, Coordinates] = field(default_factory=dict)
    gains: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Ops that multiply components by numbers of their own, with the constant that holds these."""
    moves: deque[fx.Node] = field(default_factory=deque)
    others: deque[fx.Node] = field(default_factory=deque)

    def shape(self, node: Any) -> torch.Size:
        """The shape of a tensor in the example run."""
        tensor = self.constant(node)
        found = tensor.shape if tensor is not None else self.run.shape(node)
        if found is None:
            raise CannotRotateError(f"{_text(self.program, node)} is no tensor with a known shape")
        return found

    def constant(self, node: Any) -> Tensor | None:
        return self.program.tensor(node) if isinstance(node, fx.Node) else None

    def refuse(self, node: fx.Node, why: str) -> None:
        raise CannotRotateError(f"{self.program.describe(node)} {why}")

    def join(self, value: Any, found: Coordinates, user: fx.Node, role: str = "") -> None:
        """Take a tensor into the stream: it is rotated by these coordinates."""
        if not isinstance(value, fx.Node):
            return
        if value.op == "get_attr":
            self._join_constant(Use(user, value, role, found.axis), found)
            return
        if value.op == "placeholder":
            self.refuse(value, "is an input")
        if value not in self.run.floats:
            self.refuse(value, "is no float tensor")
        known = self.tensors.get(value)
        whole = found if known is None else known.joined(found)
        if whole is None:
            self.refuse(value, f"is arranged in another way by {user.name}")
        elif known is None or not known.equals(whole):
            self.tensors[value] = whole
            for node in (value, *_users(value)):
                (self.moves if is_move(node) else self.others).append(node)

    def pending(self) -> Iterator[fx.Node]:
        """The ops to look at, until there are none. Moves come first: several may make up a tensor together."""
        while self.moves or self.others:
            yield self.moves.popleft() if self.moves else self.others.popleft()

    def _join_constant(self, use: Use, found: Coordinates) -> None:
        known = self.constants.get(use)
        whole = found if known is None else known.joined(found)
        if whole is None:
            self.refuse(use.user, f"reads {use.constant.target} in two arrangements")
        else:
            self.constants[use] = whole

    def uniform(self, value: Any, out: Coordinates) -> bool:
        """True if an elementwise operand is the same for all components of each vector of the result."""
        if not isinstance(value, fx.Node) or (value.op != "get_attr" and value not in self.run.shapes):
            return True
        shape = self.shape(value)
        axis = self.axis(out)
        own = axis - out.rank + len(shape)
        if own < 0 or shape[own] == 1:
            return True
        tensor = self.constant(value)
        return tensor is not None and bool((tensor == tensor.narrow(own, 0, 1)).all())

    def axis(self, found: Coordinates) -> int:
        axis = found.axis
        if axis is None:
            raise CannotRotateError("vectors lie on a part of several axes")
        return axis


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a tensor; those of the parts of a tuple for a split."""
    for user in node.users:
        yield user
        if is_split(user):
            yield from user.users


def is_move(node: fx.Node) -> bool:
    """True for ops that move elements and do nothing else; a part of a split counts, not the split."""
    if node.target is operator.getitem:
        return is_split(node.args[0])
    return op_name(node) in MOVING and not is_split(node)


def is_split(node: Any) -> bool:
    row = row_of(node)
    return row is not None and row.family is Family.SPLIT


def _text(program: Program, node: Any) -> str:
    return program.describe(node) if isinstance(node, fx.Node) else repr(node)


__all__ = ["CannotRotateError", "Stream", "Use", "is_move", "is_split"]
