"""The walk that finds channel groups: it labels the channels of every tensor, op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from quantc.ir.alias_analysis import Aliasing
from quantc.ir.mac_count import example_sizes
from quantc.ir.program import Program
from quantc.ir.site_index import operand_nodes
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import TensorType, TupleType, tensor_type, type_of
from quantc.observe.module import observer_nodes
from quantc.recover.channel_classes import Classes, Labels

LARGE = 1 << 20
"""Elements of a constant beyond which it is not looked into."""


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A constant that absorbs factors: it is multiplied by those of `up`, and divided by those of `down`. Both have its
    rank."""

    constant: fx.Node
    reader: fx.Node
    up: Labels | None = None
    down: Labels | None = None
    divides: bool = False
    """True if the constant is a divisor."""

    @property
    def made(self) -> Labels | None:
        """The channels of the result, whose factors it makes."""
        return self.down if self.divides else self.up

    @property
    def undone(self) -> Labels | None:
        """The channels that are read, whose factors it undoes."""
        return self.up if self.divides else self.down


@dataclass(slots=True, eq=False)
class Walk:
    """What is known so far."""

    program: Program
    classes: Classes = field(default_factory=Classes)
    labels: dict[fx.Node, Labels] = field(default_factory=dict)
    parts: dict[fx.Node, list[Labels]] = field(default_factory=dict)
    """Of ops with several results."""
    uses: list[Use] = field(default_factory=list)
    largest: Mapping[fx.Node, Tensor] = field(default_factory=dict)
    """Of ops with an upper bound: the largest value of each channel that counts; others keep what they read as it is."""
    follows: bool = False
    """True to follow channels through any elementwise op, whether it passes factors on or not."""
    limits: list[tuple[Labels, NDArray[np.float64]]] = field(default_factory=list)
    """Channels whose factor has a limit."""
    sizes: dict[str, int] = field(init=False)
    observers: set[fx.Node] = field(init=False)
    shared: set[fx.Node] = field(init=False)
    """Constants that are read more than once, or written."""

    def __post_init__(self) -> None:
        self.sizes = example_sizes(self.program)
        self.observers = set(observer_nodes(self.program))
        self.shared = _shared_constants(self.program)

    # -- facts ---------------------------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """The sizes of a tensor, dynamic ones as in the example inputs; None if they are unknown, or one is 0."""
        kind = tensor_type(node)
        if kind is None:
            return None
        found = [size if isinstance(size, int) else evaluate(size, self.sizes) for size in kind.shape]
        return None if any(not size for size in found) else tuple(found)  # type: ignore[arg-type]

    def is_float(self, node: Any) -> bool:
        kind = tensor_type(node)
        return kind is not None and kind.dtype.is_floating_point

    def constant(self, node: Any) -> Tensor | None:
        """A float constant that only one op reads, and none writes."""
        if not isinstance(node, fx.Node) or node in self.shared:
            return None
        tensor = self.program.tensor(node)
        return tensor if tensor is not None and tensor.is_floating_point() and tensor.numel() else None

    def why_no_constant(self, node: Any) -> str:
        if isinstance(node, fx.Node) and node in self.shared:
            return f"{node.target} is read more than once, or written"
        return "its weight is no constant"

    # -- labels --------------------------------------------------------------------------------------------------

    def set(self, node: fx.Node, labels: Labels) -> None:
        """Label a tensor. Channels along a dynamic axis stay as they are."""
        kind = tensor_type(node)
        if kind is not None and any(
            isinstance(size, str) and width > 1 for size, width in zip(kind.shape, labels.shape, strict=True)
        ):
            self.classes.fix(labels, f"{self.name(node)} has channels along an axis of dynamic size")
        self.labels[node] = labels

    def fixed(self, node: fx.Node, reason: str) -> None:
        """Label a result that cannot be multiplied."""
        kind = type_of(node)
        kinds = kind.items if isinstance(kind, TupleType) else (kind,)
        found = []
        for each in kinds:
            labels = self.classes.fresh((1,) * (each.rank if isinstance(each, TensorType) else 0))
            self.classes.fix(labels, reason)
            found.append(labels)
        if isinstance(kind, TupleType):
            self.parts[node] = found
        else:
            self.labels[node] = found[0]

    def keep(self, value: Any, reason: str) -> None:
        """Let a tensor that is read stay as it is."""
        if isinstance(value, fx.Node) and value in self.labels:
            self.classes.fix(self.labels[value], reason)
        for each in self.parts.get(value, ()) if isinstance(value, fx.Node) else ():
            self.classes.fix(each, reason)

    def of(self, value: Any, reader: fx.Node) -> Labels | None:
        """The labels of an operand. A constant that only this op reads may have factors for each element."""
        if not isinstance(value, fx.Node):
            return None
        tensor = self.constant(value)
        if tensor is not None and tensor.numel() <= LARGE:
            labels = self.classes.fresh(tuple(tensor.shape))
            self.uses.append(Use(value, reader, up=labels))
            return labels
        if value.op == "get_attr" and self.is_float(value):
            labels = self.classes.fresh((1,) * len(tensor_type(value).shape))  # type: ignore[union-attr]
            self.classes.fix(labels, f"{self.name(reader)} reads {value.target}, which is large or read more than once")
            return labels
        return self.labels.get(value)

    def name(self, node: fx.Node) -> str:
        return self.program.describe(node)


def _shared_constants(program: Program) -> set[fx.Node]:
    """Nodes of constants whose memory several ops read, or one writes."""
    readers: Counter[int] = Counter()
    nodes: dict[fx.Node, int] = {}
    written: set[int] = set()
    for _, graph in program.graphs():
        aliasing: Aliasing | None = None
        for node in graph.find_nodes(op="get_attr"):
            tensor = program.tensor(node)
            if tensor is None:
                continue
            key = tensor.untyped_storage().data_ptr() if not tensor.is_meta else id(tensor)
            nodes[node] = key
            readers[key] += sum(sum(operand is node for operand in operand_nodes(user)) for user in node.users)
            aliasing = aliasing if aliasing is not None else Aliasing(graph, program.owner(graph))
            if aliasing.is_written(node):
                written.add(key)
    return {node for node, key in nodes.items() if readers[key] > 1 or key in written}
