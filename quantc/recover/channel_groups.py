"""Channel groups: channels of tensors that may be multiplied by a factor without a change of what a program computes.

Constants absorb the factors: the rows of the weight that makes a tensor are multiplied, and the columns of those that read it
are divided. In between, ops pass a factor on if they are positively homogeneous, which is a fact of their rows (see
`quantc.ir.homogeneity`). One walk over the graph finds for every channel of every tensor which others it must agree with,
and which cannot change, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from quantc.ir.program import Program
from quantc.recover.channel_classes import Labels, Solved
from quantc.recover.channel_rules import label
from quantc.recover.channel_walk import Use, Walk

FIXED = -1
"""Stands for all classes whose factor is 1."""


@dataclass(frozen=True, slots=True, eq=False)
class ChannelGroup:
    """Classes of channels that belong together: those of a tensor, and of all that share one with it."""

    site: str
    """The op that makes its first tensor, and how many more it has."""
    classes: Labels
    """Those that may have a factor; none if the group is refused."""
    reason: str
    """Why a channel of it must stay as it is; empty if none must."""
    makers: tuple[fx.Node, ...]
    """Ops whose constants make the factors."""
    readers: tuple[fx.Node, ...]
    """Ops whose constants undo them."""

    @property
    def is_movable(self) -> bool:
        return bool(self.classes.size)


@dataclass(frozen=True, slots=True, eq=False)
class ChannelGroups:
    """The channel groups of a program."""

    count: int
    """The number of classes that may have a factor. `FIXED` stands for all others."""
    groups: tuple[ChannelGroup, ...]
    """In the order of the program: those between ops with weights, and those that such ops begin or end."""
    uses: tuple[Use, ...]
    tensors: dict[fx.Node, Labels]
    """The class of every channel of every tensor."""
    limits: NDArray[np.float64]
    """The largest factor that each class may have."""

    @staticmethod
    def of(
        program: Program, largest: Mapping[fx.Node, Tensor] | None = None, *, follows: bool = False
    ) -> ChannelGroups:
        """`largest` has, for ops with an upper bound, the largest value of each channel that counts: those that stay below
        the bound may have factors. Without it, none of what such an op reads may. With `follows`, classes are those of
        channels that meet in elementwise ops of any kind: nothing is fixed, and nothing may have factors."""
        walk = Walk(program, largest=largest or {}, follows=follows)
        for node in program.nodes():
            label(walk, node)
        solved = walk.classes.solved()
        if follows:
            solved.reasons.clear()
        classes = _numbered(solved)
        uses = tuple(replace(use, up=_of(classes, use.up), down=_of(classes, use.down)) for use in walk.uses)
        groups = tuple(_groups(walk, solved, classes))
        tensors = {node: np.asarray(classes[labels]) for node, labels in walk.labels.items()}
        count = int(classes.max(initial=FIXED)) + 1
        limits = np.full(count + 1, np.inf)
        for labels, most in walk.limits:
            np.minimum.at(limits, classes[labels], most)
        return ChannelGroups(count, groups, uses, tensors, limits[:count])


def _of(classes: Labels, labels: Labels | None) -> Labels | None:
    return None if labels is None else np.asarray(classes[labels])  # a number, where there are no axes


def _numbered(solved: Solved) -> Labels:
    """The class of each label, those that may have a factor in order."""
    is_free = np.ones(len(solved.root), np.bool_)
    is_free[list(solved.reasons)] = False
    roots = np.unique(solved.root[is_free[solved.root]])
    found = np.full(len(solved.root), FIXED, np.int64)
    found[roots] = np.arange(len(roots))
    return found[solved.root]


def _groups(walk: Walk, solved: Solved, classes: Labels) -> Iterator[ChannelGroup]:
    makers: dict[int, dict[fx.Node, None]] = {}
    readers: dict[int, dict[fx.Node, None]] = {}
    for use in walk.uses:
        for labels, table in ((use.made, makers), (use.undone, readers)):
            for group in () if labels is None else np.unique(solved.group[labels]).tolist():
                table.setdefault(group, {})[use.reader] = None
    members = dict(_by_group(solved.group))
    for group in sorted(readers.keys() | makers.keys()):
        own = np.asarray(members[group])
        free = np.unique(classes[own])
        reasons = [solved.reasons[each] for each in np.unique(solved.root[own]).tolist() if each in solved.reasons]
        first, last = tuple(makers.get(group, ())), tuple(readers.get(group, ()))
        reason = (
            reasons[0] if reasons else "" if first and last else "no constant makes it" if last else "nothing reads it"
        )
        free = free[free != FIXED] if first and last else free[:0]
        yield ChannelGroup(_site(walk, first, last), free, reason, first, last)


def _by_group(group: Labels) -> Iterator[tuple[int, list[int]]]:
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    for part in np.split(order, starts[1:]):
        if part.size:
            yield int(group[part[0]]), part.tolist()


def _site(walk: Walk, makers: tuple[fx.Node, ...], readers: tuple[fx.Node, ...]) -> str:
    """`conv2d (features.0 : Conv2d) and 2 more -> conv2d_1`."""

    def several(nodes: tuple[fx.Node, ...]) -> str:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        return f"{walk.name(nodes[0])}{more}" if nodes else "..."

    return f"{several(makers)} -> {several(readers)}"


__all__ = ["FIXED", "ChannelGroup", "ChannelGroups", "Use"]
