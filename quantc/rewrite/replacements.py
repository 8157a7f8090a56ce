"""Deferred replacements during one forward walk.

An immediate replacement rewrites the arguments of all users; a user with 50,000 operands would be rewritten 50,000
times. Here a replacement is recorded, and each node's operands are updated once, when the walk reaches it. Nodes behind
the walk keep their operands, so "from here on" comes for free.
"""

from __future__ import annotations

from torch import fx
from torch.fx.node import map_arg

from quantc.ir.program import Program


class Substitution:
    """Call `arrive` on every node in order, and `finish` at the end of the walk."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._stands: dict[fx.Node, fx.Node] = {}
        self._gone: list[fx.Node] = []

    def arrive(self, node: fx.Node) -> None:
        """Update the operands of a node."""
        if not self._stands or not any(operand in self._stands for operand in node.all_input_nodes):
            return
        node.args = map_arg(node.args, self.current)
        node.kwargs = map_arg(node.kwargs, self.current)
        self.program.touch()

    def current(self, node: fx.Node) -> fx.Node:
        """The replacement of a node at this point of the walk."""
        while node in self._stands:
            node = self._stands[node]
        return node

    def rename(self, node: fx.Node, to: fx.Node) -> None:
        """From here on, read `to` for `node`, which stays."""
        if to is not node:
            self._stands[node] = to

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace `old` by the new node `new`, which takes over its rows and its name.

        A node that is only spelled otherwise keeps its name: that is what users know it by.
        """
        self.program.inherit(old, new)
        old.name, new.name = new.name, old.name
        self.forward(old, new)

    def forward(self, old: fx.Node, to: fx.Node) -> None:
        """Replace `old` by the existing node `to`."""
        self.rename(old, to)
        self._gone.append(old)

    def finish(self) -> None:
        """Erase the replaced nodes, which have no users left."""
        for node in reversed(self._gone):
            self.program.erase(node)
