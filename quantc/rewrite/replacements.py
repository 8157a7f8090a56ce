"""Replacements made in the course of one forward walk.

Replacing a node at once rewrites the arguments of all its users; a user with 50,000 operands would be rewritten 50,000
times. Here a replacement is noted, and each node's operands are brought up to date once, when the walk reaches it.
What the walk has passed keeps what it read, so "from here on" comes for free.
"""

from __future__ import annotations

from torch import fx
from torch.fx.node import map_arg

from quantc.ir.program import Program


class Substitution:
    """Call `arrive` on every node in order; `finish` when the walk is over."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._stands: dict[fx.Node, fx.Node] = {}
        self._gone: list[fx.Node] = []

    def arrive(self, node: fx.Node) -> None:
        """Bring the operands of a node up to date."""
        if not self._stands or not any(operand in self._stands for operand in node.all_input_nodes):
            return
        node.args = map_arg(node.args, self.current)
        node.kwargs = map_arg(node.kwargs, self.current)
        self.program.touch()

    def current(self, node: fx.Node) -> fx.Node:
        """What stands for a node at this point of the walk."""
        while node in self._stands:
            node = self._stands[node]
        return node

    def rename(self, node: fx.Node, to: fx.Node) -> None:
        """From here on `to` is read for `node`, which stays."""
        if to is not node:
            self._stands[node] = to

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """`new`, made for this, stands for `old`, takes over its rows and its name, and `old` will go.

        A node that is only spelled otherwise keeps its name: that is what users know it by."""
        self.program.inherit(old, new)
        old.name, new.name = new.name, old.name
        self.forward(old, new)

    def forward(self, old: fx.Node, to: fx.Node) -> None:
        """`to`, which was there before, stands for `old`, which will go."""
        self.rename(old, to)
        self._gone.append(old)

    def finish(self) -> None:
        """Erase what was replaced; nobody uses it any more."""
        for node in reversed(self._gone):
            self.program.erase(node)
