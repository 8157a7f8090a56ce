"""Model synthesis: small programs that contain the pattern of a rule."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quantc.ir.dialect import BY_NAME, Argument, arguments, op_name, short_name
from quantc.ir.op_row import Trait
from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.ir.types import DTYPES, TensorType, type_of_value
from quantc.patterns.dsl import (
    AnyOf,
    Chain,
    Items,
    Operand,
    OpPattern,
    OptionalNode,
    Pattern,
    Result,
    Shared,
    open_operand,
)
from quantc.patterns.op_names import op_target
from quantc.patterns.operand_patterns import ANYTHING, Leaf, LeafKind, LiteralValue
from quantc.patterns.table import Rule
from quantc.testing.arguments import PARAMETERS, Wanted
from quantc.testing.choices import Choices, Explored, NoExampleError, explore
from quantc.testing.op_examples import OP_EXAMPLES, RANKS

SEED = 20
Settled: TypeAlias = "fx.Node | Leaf | list[Any] | Any"
"""The value of an operand: a node, a leaf for its op to choose, a list of these, or a plain value."""


@dataclass(frozen=True)
class Model:
    """A program made for a rule."""

    label: str
    program: Program
    claimed: tuple[str, ...] = ()
    """The nodes the rule is to claim; none are named for a model that was given."""
    text: str = field(init=False)
    """The program as it was when the model was made, with digests of its constants."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.program.dump())


@dataclass
class Sketch:
    """A program under construction, and the values of its nodes."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    root: nn.Module = field(default_factory=nn.Module)
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def input(self, hint: str, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(hint)
        last = [other for other in self.values if other.op == "placeholder"]
        if last:
            last[-1].append(node)  # fx wants them before everything else
        elif self.values:
            next(iter(self.graph.nodes)).prepend(node)
        return self._known(node, value)

    def constant(self, hint: str, value: Tensor) -> fx.Node:
        name = hint if not hasattr(self.root, hint) else f"{hint}_{len(self.values)}"
        self.root.register_parameter(name, nn.Parameter(value, requires_grad=False))
        return self._known(self.graph.create_node("get_attr", name), value)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        name = short_name(target) if target is not operator.getitem else "getitem"
        real_args, real_kwargs = map_arg((args, kwargs or {}), self.values.__getitem__)
        try:
            value = target(*real_args, **real_kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise NoExampleError(
                f"{name} does not run on what was made for it: {str(error).splitlines()[0]}"
            ) from error
        return self._known(self.graph.create_node("call_function", target, args, kwargs, name=name), value)

    def _known(self, node: fx.Node, value: Any) -> fx.Node:
        self.values[node] = value
        node.meta["val"] = type_of_value(value)
        return node

    def program(self, root: fx.Node) -> Program:
        """The program that yields `root`; of several tensors, the float ones."""
        value = self.values[root]
        outputs = [root]
        if isinstance(value, tuple | list):
            floats = [n for n, item in enumerate(value) if item.is_floating_point() and item.numel()]
            outputs = [self.call(operator.getitem, (root, n)) for n in floats]
        self.graph.output(tuple(outputs))
        inputs = self.graph.find_nodes(op="placeholder")
        types = [Input(node.name, kind) for node in inputs if isinstance(kind := node.meta["val"], TensorType)]
        signature = Signature(
            tuple(types),
            pytree.tree_structure(((0,) * len(inputs), {})),
            pytree.tree_structure(0 if len(outputs) == 1 else (0,) * len(outputs)),
        )
        examples = tuple(self.values[node] for node in inputs)
        return Program(self.graph, self.root, signature, stage=Stage.CANONICAL, example_inputs=examples)


class _Maker:
    """One way through a pattern, drawn as a program."""

    def __init__(self, choices: Choices, from_outside: frozenset[str]) -> None:
        self.choices = choices
        self.from_outside = from_outside
        self.sketch = Sketch()
        self.random = torch.Generator().manual_seed(SEED)
        self.bound: dict[str, Any] = {}
        self.done: dict[tuple[Operand, Any, bool], Settled] = {}
        """Equal sub-patterns are the same node."""
        self.claimed: list[fx.Node] = []

    # -- patterns ------------------------------------------------------------------------------------------------

    def settle(self, item: Operand, feed: Settled, rank: int | None, *, shared: bool = False) -> Settled:
        """Build an operand, its own first operand taken from `feed` if there is one."""
        if not isinstance(item, Pattern):
            return item.value if isinstance(item, LiteralValue) else item
        key = (item, feed, shared)
        if key not in self.done:
            self.done[key] = self._settle(item, feed, rank, shared)
        return self.done[key]

    def _settle(self, item: Pattern, feed: Settled, rank: int | None, shared: bool) -> Settled:
        match item:
            case OpPattern():
                return self._op(item, feed, rank, shared)
            case Chain(steps=steps):
                for step, wanted in zip(steps, self._ranks(steps, rank), strict=True):
                    feed = self.settle(step, feed, wanted, shared=shared)
                return feed
            case OptionalNode(inner=inner):
                if self.choices.take(f"optional {inner}", f"with {inner}", f"without {inner}") == 0:
                    return self.settle(inner, feed, rank, shared=shared)
                return feed if feed is not None else _open(inner)
            case AnyOf(options=options):
                words = tuple(str(option) for option in options)
                return self.settle(options[self.choices.take(f"any of {words}", *words)], feed, rank, shared=shared)
            case Result(inner=inner, index=index, name=name):
                several = self.settle(inner, feed, rank, shared=shared)
                return self._made(self.sketch.call(operator.getitem, (several, index or 0)), name, shared)
            case Shared(inner=inner):
                return self.settle(inner, feed, rank, shared=True)
            case Items(items=items):
                return [self.settle(part, None, rank, shared=shared) for part in items]
            case _:
                raise NoExampleError(f"{item} is a pattern of a kind that no model is known for")

    def _ranks(self, steps: tuple[Pattern, ...], rank: int | None) -> list[int | None]:
        """Rank that each step of a chain should yield, so that the next one can read it."""
        found = [rank]
        for step in reversed(steps[1:]):
            found.append(self._reads(step, found[-1]))
        return found[::-1]

    def _reads(self, step: Operand, rank: int | None) -> int | None:
        """Rank that a step reads if it is to yield `rank`."""
        match step:
            case OpPattern(ops=ops):
                op = ops[self.choices.take(f"op {'|'.join(ops)}", *ops)]
                keeps = op in BY_NAME and Trait.ELEMENTWISE in BY_NAME[op].traits
                return RANKS.get(op, rank if keeps else None)
            case OptionalNode(inner=inner) | Shared(inner=inner) | Result(inner=inner):
                return self._reads(inner, rank)
            case _:
                return None

    def _made(self, node: fx.Node, name: str | None, shared: bool) -> fx.Node:
        if name is not None:
            self.bound[name] = node
        if not shared:
            self.claimed.append(node)
        return node

    # -- calls ---------------------------------------------------------------------------------------------------

    def _op(self, pattern: OpPattern, feed: Settled, rank: int | None, shared: bool) -> fx.Node:
        op = pattern.ops[self.choices.take(f"op {'|'.join(pattern.ops)}", *pattern.ops)]
        rows = arguments(op_target(op))
        given = list(pattern.operands) or ([ANYTHING] if feed is not None else [])
        wanted_rank = RANKS.get(op, rank)
        settled = {
            row.name: feed
            if index == 0 and feed is not None
            else self.settle(given[index], None, wanted_rank, shared=shared)
            for index, row in enumerate(rows[: len(given)])
        }
        for item in settled.values():
            if isinstance(item, Leaf) and item.ranks and wanted_rank not in item.ranks:
                wanted_rank = item.ranks[0]
        call = _Call(self, op, rows, settled)
        checks = dict(pattern.where)
        wanted = Wanted(op, call.known(), checks, wanted_rank, self.choices, self.random)
        values = OP_EXAMPLES.complete(wanted)
        args, kwargs = call.arguments(values)
        return self._made(self.sketch.call(op_target(op), args, kwargs), pattern.name, shared)


def _open(pattern: Operand) -> Operand:
    """Replacement for an optional node that is absent at the start of a chain."""
    match pattern:
        case OpPattern():
            return open_operand(pattern)
        case Chain(steps=(first, *_)) | AnyOf(options=(first, *_)):
            return _open(first)
        case OptionalNode(inner=inner) | Shared(inner=inner) | Result(inner=inner):
            return _open(inner)
        case _:
            return pattern


@dataclass
class _Call:
    """Arguments of one call, from pattern to nodes."""

    maker: _Maker
    op: str
    rows: tuple[Argument, ...]
    settled: dict[str, Settled]

    def known(self) -> dict[str, Any]:
        """Fixed arguments as values; unbound leaves are for the example to choose."""
        found: dict[str, Any] = {}
        for row in self.rows:
            item = self.settled.get(row.name, ANYTHING)
            if isinstance(item, Leaf):
                item = self.settled[row.name] = self._leaf(item, row)
            if isinstance(item, list):
                found[row.name] = [None if isinstance(part, Leaf) else self._value(part) for part in item]
            elif not isinstance(item, Leaf):
                found[row.name] = self._value(item)
        return found

    def _value(self, item: Any) -> Any:
        return self.maker.sketch.values[item] if isinstance(item, fx.Node) else item

    def _leaf(self, leaf: Leaf, row: Argument) -> Settled:
        if leaf.name in self.maker.bound:
            return self.maker.bound[leaf.name]
        can_be = leaf.may_be_absent and (row.has_default or row.type.startswith("Optional"))
        if can_be and self.maker.choices.is_absent(leaf.name):
            self.maker.bound[leaf.name] = None
            return None
        if leaf.kind is LeafKind.NUMBER:
            return row.default if isinstance(row.default, int | float) else 1.5
        if leaf.kind is LeafKind.LIST and row.name == "xs":
            more = self.maker.choices.take(f"{leaf.name} items", f"two {leaf.name}", f"three {leaf.name}")
            return [Leaf(LeafKind.VALUE, f"{leaf.name}_{n}") for n in range(2 + more)]
        return leaf

    def arguments(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and keywords. New tensors become inputs or constants."""
        kwargs = {row.aten_name: self._node(row, values[row.name]) for row in self._given(values, keyword_only=True)}
        positional = list(self._given(values, keyword_only=False))
        last = self.rows.index(positional[-1]) + 1 if positional else 0
        args = tuple(
            self._node(row, values[row.name]) if row.name in values else row.default for row in self.rows[:last]
        )
        return args, kwargs

    def _given(self, values: Mapping[str, Any], *, keyword_only: bool) -> list[Argument]:
        return [row for row in self.rows if row.name in values and row.keyword_only is keyword_only]

    def _node(self, row: Argument, value: Any) -> Any:
        item = self.settled.get(row.name, ANYTHING)
        if isinstance(item, fx.Node):
            return item
        if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
            items = item if isinstance(item, list) else [ANYTHING] * len(value)
            return [self._tensor(row, part, value[n], f"{row.name}_{n}") for n, part in enumerate(items)]
        return self._tensor(row, item, value, row.name)

    def _tensor(self, row: Argument, item: Settled, value: Any, hint: str) -> Any:
        if not isinstance(item, Leaf) or not isinstance(value, Tensor):
            return item if isinstance(item, fx.Node) else value
        if item.ranks and value.dim() not in item.ranks:
            raise NoExampleError(f"{self.op}: {item} cannot have {value.dim()} axes here")
        if item.dtypes and "f32" not in item.dtypes:
            value = value.to(DTYPES[item.dtypes[0]])
        name = item.name if item.name != "_" else hint
        usual = row.name in PARAMETERS and item.name not in self.maker.from_outside
        sketch = self.maker.sketch
        node = sketch.constant(name, value) if usual or item.kind is LeafKind.CONST else sketch.input(name, value)
        if item.name != "_":
            self.maker.bound[item.name] = node
        return node


def draw(rule: Rule, choices: Choices, from_outside: frozenset[str] = frozenset()) -> Model:
    """Model of one combination of choices in a rule's pattern. Operands named in `from_outside` are inputs, even if weights."""
    maker = _Maker(choices, from_outside)
    root = maker.settle(rule.pattern, None, None)
    if not isinstance(root, fx.Node):
        raise NoExampleError(f"{rule.pattern} comes to no node")
    ops = [op_name(node) for node in maker.claimed if node.target is not operator.getitem]
    words = [word for word in str(choices).split(", ") if word and word not in ops]
    label = " > ".join(ops) + (f" ({', '.join(words)})" if words else "")
    return Model(label, maker.sketch.program(root), tuple(node.name for node in maker.claimed))


def leaves_of(pattern: Operand) -> tuple[Leaf, ...]:
    """Leaves of a pattern, each once."""
    found: dict[Leaf, None] = {}
    pending: list[Operand] = [pattern]
    while pending:
        part = pending.pop()
        if isinstance(part, Leaf):
            found.setdefault(part)
        elif isinstance(part, Pattern):
            pending.extend(part.parts())
    return tuple(found)


def models_of(rule: Rule, from_outside: frozenset[str] = frozenset()) -> Explored[Model]:
    """Models that show each alternative of a rule's pattern."""
    return explore(lambda choices: draw(rule, choices, from_outside))
