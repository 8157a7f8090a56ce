"""Sample of rows: those with the smallest hash of batch and row, so that any split of the data keeps the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from quantc.errors import LoadError, SpecError
from quantc.spec.observation import Order, State
from quantc.spec.spec import Option
from quantc.spec.statistic import Change, Permutation, Rotation, Scale, check_same_kind, check_widths

DEFAULT_SIZE = 256


def row_keys(batch: int, count: int) -> Tensor:
    """A hash of batch and row for each row of a batch: non-negative int64, by the finalizer of splitmix64."""
    z = np.arange(count, dtype=np.uint64) + (np.uint64(batch) << np.uint64(32)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64))


def smallest(keys: Tensor, count: int) -> Tensor:
    """The places of the smallest keys, ascending by key."""
    return torch.topk(keys, min(count, len(keys)), largest=False, sorted=True).indices


@dataclass(eq=False, slots=True)
class Reservoir:
    """A uniform sample of the rows that were seen, without replacement."""

    statistics: ClassVar[str] = "reservoir"
    order: ClassVar[Order] = Order.FREE

    size: int = DEFAULT_SIZE
    seen: int = 0
    keys: Tensor | None = None
    """The hashes of the rows, ascending."""
    rows: Tensor | None = None
    """`[groups, rows, channels]`, float32."""

    @classmethod
    def empty(cls, options: Mapping[str, Option]) -> Self:
        rest = dict(options)
        size = rest.pop("rows", DEFAULT_SIZE)
        if rest:
            raise SpecError(f"the statistic reservoir has no option {next(iter(rest))!r}", advice="it has: rows")
        if type(size) is not int or size < 1:
            raise SpecError(f"rows: it must be a whole number of at least 1 (given: {size!r})")
        return cls(size)

    def update(self, x: Tensor, *, batch: int = 0, where: str = "") -> None:
        if not x.numel():
            return
        keys = row_keys(batch, x.shape[1])
        chosen = smallest(keys, self.size)
        total = self._merged(type(self)(self.size, x.shape[1], keys[chosen], x[:, chosen].contiguous()), where)
        self.seen, self.keys, self.rows = total.seen, total.keys, total.rows

    def merge(self, other: Self) -> Self:
        check_same_kind(self, other)
        if self.size != other.size:
            raise SpecError(f"reservoirs of {self.size} and of {other.size} rows cannot be merged")
        return self._merged(other, "")

    def _merged(self, other: Self, where: str) -> Self:
        seen = self.seen + other.seen
        if self.keys is None or self.rows is None:
            return type(self)(self.size, seen, other.keys, other.rows)
        if other.keys is None or other.rows is None:
            return type(self)(self.size, seen, self.keys, self.rows)
        check_widths(self.rows[:, 0].shape, other.rows[:, 0].shape, where)
        keys, rows = torch.cat([self.keys, other.keys]), torch.cat([self.rows, other.rows], dim=1)
        order = torch.from_numpy(np.lexsort((_contents(rows), keys.numpy()))[: self.size].copy())
        return type(self)(self.size, seen, keys[order], rows[:, order])

    def carried(self, by: Change) -> Self | None:
        """The same rows, changed; None for permutations and rotations of grouped channels."""
        if self.rows is None:
            return type(self)(self.size, self.seen)
        if isinstance(by, Scale):
            factors = by.factors.float().expand(self.rows.shape[0], -1)
            return type(self)(self.size, self.seen, self.keys, self.rows * factors.unsqueeze(1))
        if self.rows.shape[0] > 1:
            return None
        if isinstance(by, Permutation):
            return type(self)(self.size, self.seen, self.keys, self.rows[:, :, by.index])
        return type(self)(self.size, self.seen, self.keys, _turned(self.rows, by))

    def to_state(self) -> State:
        values = {"seen": self.seen, "size": self.size}
        return State({} if self.keys is None or self.rows is None else {"keys": self.keys, "rows": self.rows}, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        loaded = cls(state.count("size"), state.count("seen"))
        if loaded.size < 1:
            raise LoadError("the field 'size' is 0: a reservoir has at least one row")
        if not state.tensors and not loaded.seen:
            return loaded
        loaded.keys, loaded.rows = state.tensor("keys", torch.int64), state.tensor("rows", torch.float32)
        held = loaded.rows.shape[1] if loaded.rows.dim() == 3 else -1
        if loaded.keys.dim() != 1 or len(loaded.keys) != held or held != min(loaded.size, loaded.seen):
            raise LoadError("the tensors 'keys' and 'rows' are not a row for each key")
        if bool((loaded.keys.diff() < 0).any()):
            raise LoadError("the tensor 'keys' is not ascending")
        return loaded


def _turned(rows: Tensor, by: Rotation) -> Tensor:
    return (rows.double() @ by.matrix.double()).float()


def _contents(rows: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A hash of each row's bits: it orders rows of equal keys, as of batches that were numbered alike in two places."""
    bits = rows.contiguous().view(torch.int32).to(torch.int64)
    odd = row_keys(0, rows.shape[0] * rows.shape[2]).reshape(rows.shape[0], 1, rows.shape[2]) | 1
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = (bits * odd).sum((0, 2)).numpy()
    return found
