"""Equivalence classes of channels: which channels of which tensors must be multiplied by the same factor.

Labels are arrays of class numbers, of the tensor's rank: an axis along which the class is the same has size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]


@dataclass(slots=True)
class Classes:
    """Classes of channels, in the making."""

    sources: list[Labels] = field(default_factory=list)
    """The labels that were made, each its own range of numbers."""
    count: int = 0
    pairs: list[tuple[Labels, Labels]] = field(default_factory=list)
    fixed: list[tuple[Labels, str]] = field(default_factory=list)
    """Labels whose factor must be 1, each with the reason."""

    _is_fixed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1024, np.bool_))

    def fresh(self, shape: Sequence[int]) -> Labels:
        """Labels of their own for every element of a shape."""
        size = int(np.prod(shape, dtype=np.int64))
        found = np.arange(self.count, self.count + size, dtype=np.int64).reshape(shape)
        self.count += size
        self.sources.append(found)
        while self.count > len(self._is_fixed):
            self._is_fixed = np.concatenate([self._is_fixed, np.zeros_like(self._is_fixed)])
        return found

    def fix(self, labels: Labels, reason: str) -> None:
        """Let channels stay as they are."""
        if labels.size:
            self.fixed.append((labels.reshape(-1), reason))
            self._is_fixed[labels] = True

    def is_fixed(self, labels: Labels) -> bool:
        """True if all of some channels are known by now to stay as they are."""
        return bool(self._is_fixed[labels].all())

    def unite(self, one: Labels, other: Labels) -> Labels:
        """The labels of both, broadcast, which are the same from now on."""
        if one is other:
            return one
        wide = np.broadcast_shapes(one.shape, other.shape)
        a, b = np.broadcast_to(one, wide), np.broadcast_to(other, wide)
        if a.size:
            self.pairs.append((a.reshape(-1), b.reshape(-1)))
        return one if one.shape == wide else other if other.shape == wide else np.ascontiguousarray(a)

    def tied(self, labels: Labels, axes: Sequence[int]) -> Labels:
        """Labels that are the same along some axes, with size 1 there."""
        for axis in axes:
            if labels.shape[axis] == 1:
                continue
            if labels.shape[axis] == 0:
                return labels
            first = np.take(labels, [0], axis=axis)
            self.unite(labels, first)
            labels = first
        return labels

    def solved(self) -> Solved:
        """The classes, once everything is known."""
        one = np.concatenate([a for a, _ in self.pairs] or [np.empty(0, np.int64)])
        other = np.concatenate([b for _, b in self.pairs] or [np.empty(0, np.int64)])
        root = components(self.count, one, other)
        reasons: dict[int, str] = {}
        for labels, reason in self.fixed:
            for label in np.unique(root[labels]).tolist():
                reasons.setdefault(label, reason)
        source = np.repeat(np.arange(len(self.sources)), [each.size for each in self.sources])
        group = components(len(self.sources), source[one], source[other])
        return Solved(root, reasons, group[source])


@dataclass(frozen=True, slots=True)
class Solved:
    """The classes of a program."""

    root: Labels
    """The class of each label."""
    reasons: dict[int, str]
    """For classes whose factor must be 1: why."""
    group: Labels
    """The group of each label: labels that were made together, or have a class in common."""


def components(count: int, one: Labels, other: Labels) -> Labels:
    """The least member of each number's connected component."""
    root = np.arange(count, dtype=np.int64)
    while one.size:
        a, b = root[one], root[other]
        apart = a != b
        if not apart.any():
            break
        one, other, a, b = one[apart], other[apart], a[apart], b[apart]
        low = np.minimum(a, b)
        np.minimum.at(root, a, low)
        np.minimum.at(root, b, low)
        while True:
            shorter = root[root]
            if np.array_equal(shorter, root):
                break
            root = shorter
    return root
