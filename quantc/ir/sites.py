"""Sites in a Program, origins, and the typed tables of facts about nodes.

Passes communicate through these tables. Rows follow their nodes: `Program.replace` moves them and `Program.erase` drops
them, so a rewrite can neither lose a fact nor leave a stale one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import fx

V = TypeVar("V")


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """The location of a tensor: an output of a node, or one of a node's operands.

    `graph` is the path of the nested graph ("" is the top one). Exactly one of `out` and `operand` is set. The text
    form is `conv2d:out0`, `conv2d:in1` or `true_graph_0/conv2d:in1`.
    """

    graph: str
    node: str
    out: int | None = None
    operand: int | None = None

    def __str__(self) -> str:
        place = f"out{self.out}" if self.out is not None else f"in{self.operand}"
        return f"{self.graph}/{self.node}:{place}" if self.graph else f"{self.node}:{place}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The location in the user's code that a node comes from."""

    module_path: str = ""
    module_type: str = ""
    file: str = ""
    line: int = 0

    @property
    def source(self) -> str:
        """`model.py:12`, or the empty string when the line is unknown."""
        if not self.file:
            return ""
        return f"{self.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}"

    @property
    def class_name(self) -> str:
        return self.module_type.rsplit(".", 1)[-1]

    def __str__(self) -> str:
        """`layer1.0.conv : Conv2d @ model.py:12`; unknown parts are omitted."""
        text = self.module_path
        if self.class_name:
            text = f"{text} : {self.class_name}" if text else f": {self.class_name}"
        if self.source:
            text = f"{text} @ {self.source}" if text else f"@ {self.source}"
        return text


@dataclass(frozen=True, slots=True)
class ModeValue:
    """An argument that differs between training and inference, such as dropout's `train`."""

    position: int
    train: bool | float
    eval: bool | float

    def value(self, training: bool) -> bool | float:
        return self.train if training else self.eval


@dataclass(frozen=True, slots=True)
class SetAside:
    """A batch norm detached from the graph behind a convolution or linear, for training: the names of its tensors, and
    its options."""

    gamma: str | None
    beta: str | None
    mean: str
    var: str
    eps: float
    momentum: float
    counter: str | None
    """The buffer that counts its batches."""
    follows_mode: bool
    """True if it updates its statistics in training; else they are fixed."""
    name: str
    """The name of its node."""


@dataclass(slots=True)
class NodeTable(Generic[V]):
    """Facts about nodes, one row a node.

    Keyed by the node itself rather than its name: after a rewrite a name may belong to another node, a node object may
    not.
    """

    rows: dict[fx.Node, V] = field(default_factory=dict)

    def __getitem__(self, node: fx.Node) -> V:
        return self.rows[node]

    def __setitem__(self, node: fx.Node, value: V) -> None:
        self.rows[node] = value

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self.rows)

    def get(self, node: fx.Node) -> V | None:
        return self.rows.get(node)

    def move(self, old: fx.Node, new: fx.Node) -> None:
        """Move `old`'s row to `new` unless `new` has one already."""
        if old in self.rows:
            self.rows.setdefault(new, self.rows.pop(old))

    def drop(self, node: fx.Node) -> None:
        self.rows.pop(node, None)

    def renamed(self, nodes: Mapping[fx.Node, fx.Node]) -> NodeTable[V]:
        """The same rows for a copy of the graph; `nodes` maps old nodes to new ones."""
        return NodeTable({nodes[node]: value for node, value in self.rows.items() if node in nodes})
