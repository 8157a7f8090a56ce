"""Coordinates: which elements of a tensor are the components of which vectors.

A rotation acts on vectors of `width` components. A tensor holds many, along one axis (hidden states), several side by
side on it (heads), or on a part of it (the values in a joint projection of queries, keys and values). All of it is one
integer tensor, with an axis of size 1 wherever the pattern repeats. Ops that only move elements are carried out on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1
Move = Callable[[Tensor], Tensor]


class NotAVectorError(Exception):
    """Vectors are cut or spread over axes; `width` is that of the parts which may be whole."""

    def __init__(self, width: int) -> None:
        super().__init__(f"vectors are cut into parts of {width}")
        self.width = width


@dataclass(frozen=True, eq=False)
class Coordinates:
    """`ids` has the rank of the tensor: vector * width + component, or `NONE`; an axis of size 1 repeats."""

    ids: Tensor
    width: int

    @classmethod
    def along(cls, rank: int, axis: int, size: int, width: int) -> Coordinates:
        """Vectors side by side along one axis."""
        return cls.on(rank, axis, torch.ones(size, dtype=torch.bool), width)

    @classmethod
    def on(cls, rank: int, axis: int, places: Tensor, width: int) -> Coordinates:
        """Vectors side by side on some places along one axis."""
        shape = [1] * rank
        shape[axis] = len(places)
        ids = torch.full((len(places),), NONE)
        ids[places] = torch.arange(int(places.sum()))
        return cls(ids.reshape(shape), width)

    @classmethod
    def of(cls, full: Tensor, width: int) -> Coordinates:
        """From one id for each element of a tensor. NotAVectorError unless every vector is whole and along one axis."""
        _check_whole(full, width)
        ids = full
        for axis in range(ids.dim()):
            ids = _collapsed(ids, axis, width)
        _check_straight(ids, width)
        return cls(_renumbered(_told_apart(ids, width), width), width)

    @property
    def rank(self) -> int:
        return self.ids.dim()

    @property
    def axis(self) -> int | None:
        """The only axis along which the ids change; None if there are several."""
        axes = [axis for axis, size in enumerate(self.ids.shape) if size > 1]
        return axes[0] if len(axes) == 1 else None

    @property
    def line(self) -> Tensor:
        """The ids along that axis."""
        return self.ids.reshape(-1)

    @property
    def is_full(self) -> bool:
        """True if every element belongs to a vector."""
        return bool((self.ids != NONE).all())

    def at(self, rank: int, axis: int) -> Coordinates:
        """The same line of ids along an axis of another tensor."""
        shape = [1] * rank
        shape[axis] = -1
        return Coordinates(self.ids.reshape(shape), self.width)

    def vectors(self) -> Tensor:
        """The positions along the axis of each vector's components, `[vectors, width]`."""
        order = torch.argsort(self.line, stable=True)
        return order[int((self.line == NONE).sum()) :].reshape(-1, self.width)

    def expanded(self, shape: torch.Size) -> Tensor:
        """An id for each element of a tensor of that shape; repeated vectors are told apart."""
        repeats = [1 if own > 1 else size for own, size in zip(self.ids.shape, shape, strict=True)]
        count = int(self.ids.max()) // self.width + 1
        number = torch.arange(torch.Size(repeats).numel()).reshape(repeats) * (count * self.width)
        return torch.where(self.ids != NONE, self.ids + number, NONE)

    def equals(self, other: Coordinates) -> bool:
        return self.width == other.width and torch.equal(self.ids, other.ids)

    def joined(self, other: Coordinates) -> Coordinates | None:
        """The ids of both, where they agree or have nothing in common; None where they contradict each other."""
        if self.equals(other):
            return self
        if self.width != other.width or self.rank != other.rank:
            return None
        shape = torch.Size(max(sizes) for sizes in zip(self.ids.shape, other.ids.shape, strict=True))
        one, two = self.expanded(shape), other.expanded(shape)
        mine, theirs = one != NONE, two != NONE
        both = mine & theirs
        if bool(both.any()):
            common = [_renumbered(torch.where(both, each, NONE), self.width) for each in (one, two)]
            if not torch.equal(*common):
                return None
        if not bool((theirs & ~mine).any()):
            return self
        if not bool((mine & ~theirs).any()):
            return other
        shift = (int(one.max()) // self.width + 1) * self.width
        return Coordinates.of(torch.where(mine, one, torch.where(theirs, two + shift, NONE)), self.width)

    def moved(self, move: Move, shape: torch.Size) -> Coordinates | None:
        """The coordinates of what a move of elements yields; None if that has no vectors."""
        found = move(self.expanded(shape))
        return Coordinates.of(found, self.width) if bool((found != NONE).any()) else None

    def moved_back(self, move: Move, shape: torch.Size, after: torch.Size) -> Coordinates:
        """The coordinates, before a move of elements, of a tensor whose coordinates after it are these."""
        count = shape.numel()
        source = move(torch.arange(count).reshape(shape)).reshape(-1)
        ids = self.expanded(after).reshape(-1)
        none = torch.iinfo(torch.int64).max
        taken = source[ids != NONE], ids[ids != NONE]
        found = torch.full((count,), none).scatter_reduce_(0, *taken, "amin")
        last = torch.full((count,), NONE).scatter_reduce_(0, *taken, "amax")
        if not torch.equal(
            torch.where(found == none, NONE, found % self.width), torch.where(last < 0, NONE, last % self.width)
        ):
            raise NotAVectorError(1)
        return Coordinates.of(torch.where(found == none, NONE, found).reshape(shape), self.width)


def _told_apart(ids: Tensor, width: int) -> Tensor:
    """A number of its own for each copy of a vector."""
    flat = ids.reshape(-1)
    there = (flat != NONE).nonzero()[:, 0]
    order = there[torch.argsort(flat[there], stable=True)]
    _, inverse, counts = torch.unique_consecutive(flat[order], return_inverse=True, return_counts=True)
    if int(counts.max()) == 1:
        return ids
    if bool((counts.reshape(-1, width) != counts.reshape(-1, width)[:, :1]).any()):
        raise NotAVectorError(1)
    copy = torch.arange(len(order)) - (counts.cumsum(0) - counts)[inverse]
    found = flat.clone()
    found[order] = (flat[order] // width * int(counts.max()) + copy) * width + flat[order] % width
    return found.reshape(ids.shape)


def _renumbered(ids: Tensor, width: int) -> Tensor:
    """Vectors numbered in order of their first element."""
    flat = ids.reshape(-1)
    there = flat != NONE
    names, inverse = torch.unique(flat[there] // width, return_inverse=True)
    first = torch.full((len(names),), flat.numel()).scatter_reduce_(0, inverse, torch.arange(len(inverse)), "amin")
    rank = torch.argsort(torch.argsort(first))
    found = torch.full_like(flat, NONE)
    found[there] = rank[inverse] * width + flat[there] % width
    return found.reshape(ids.shape)


def _check_whole(full: Tensor, width: int) -> None:
    """NotAVectorError if a vector is there in part."""
    present = torch.unique(full[full != NONE])
    counts = torch.unique(present // width, return_counts=True)[1]
    if bool((counts != width).any()):
        raise NotAVectorError(int(counts.min()))


def _collapsed(ids: Tensor, axis: int, width: int) -> Tensor:
    """The ids without the repetitions along an axis; unchanged if they are none."""
    size = ids.shape[axis]
    if size == 1:
        return ids
    rows = ids.movedim(axis, 0).reshape(size, -1)
    one = ids.narrow(axis, 0, 1)
    first = rows[0]
    there = first != NONE
    if not bool(there.any()) or not torch.equal(
        torch.where(rows == NONE, NONE, rows % width), torch.where(there, first % width, NONE).expand_as(rows)
    ):
        return ids
    names, inverse = torch.unique(first[there] // width, return_inverse=True)
    if len(torch.unique(first[there])) != len(names) * width:
        return ids
    vectors = rows[:, there] // width
    where = torch.full((len(names),), len(inverse)).scatter_reduce_(0, inverse, torch.arange(len(inverse)), "amin")
    heads = vectors[:, where]
    if not torch.equal(heads[:, inverse], vectors):
        return ids
    ordered = heads.sort(1).values
    if len(names) > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return ids
    return one


def _check_straight(ids: Tensor, width: int) -> None:
    """NotAVectorError if a vector extends along more than one axis."""
    axes = [axis for axis, size in enumerate(ids.shape) if size > 1]
    if len(axes) < 2:
        return
    index = (ids != NONE).nonzero()
    vector = ids[ids != NONE] // width
    mine = index[vector == vector.min()]
    spans = [axis for axis in axes if int(mine[:, axis].max()) > int(mine[:, axis].min())]
    if len(spans) > 1:
        raise NotAVectorError(len(torch.unique(mine[:, spans[-1]])))


__all__ = ["NONE", "Coordinates", "Move", "NotAVectorError"]
