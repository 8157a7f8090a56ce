"""The nodes of a compiled pattern, each of which fits a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from quantc.ir.dialect import target_name
from quantc.patterns.checks import Check, Plain, same
from quantc.patterns.graph_values import argument_at, has_node, is_tensor_node, show, why_not_type
from quantc.patterns.operand_patterns import Leaf, LeafKind
from quantc.patterns.pattern_search import Core, Heads, NodeCore, Search
from quantc.patterns.refusals import (
    NOUNS,
    Cause,
    ComputedArgument,
    Fault,
    Said,
    UsedElsewhere,
    WrongArguments,
    WrongOp,
    WrongOperand,
    WrongValue,
)


class OpCore(NodeCore):
    """A call of one of some ops."""

    __slots__ = (
        "arity",
        "checks",
        "commuting",
        "leaves",
        "max_users",
        "name",
        "nested",
        "rest",
        "rows",
        "swapped",
        "text",
    )

    def __init__(
        self,
        number: int,
        rows: Mapping[Any, tuple[tuple[str, Any], ...]],
        operands: tuple[Core, ...],
        *,
        text: str,
        name: str | None,
        checks: tuple[tuple[str, Check, dict[Any, int]], ...],
        shared: bool,
        commuting: frozenset[Any],
    ) -> None:
        least = frozenset[int]().union(*(operand.least for operand in operands), (number,))
        most = frozenset[int]().union(*(operand.most for operand in operands), (number,))
        super().__init__(number, frozenset(rows), least, most)
        self.rows = rows
        self.text = text
        self.name = name
        self.checks = checks
        self.shared = shared
        self.max_users = 0
        self.arity = len(operands)
        pairs = tuple(enumerate(operands))
        # in reverse, as the goal pushed last is tried first
        self.nested = tuple(pair for pair in reversed(pairs) if not isinstance(pair[1], LeafCore | LiteralCore))
        self.leaves = tuple(pair for pair in pairs if isinstance(pair[1], LeafCore | LiteralCore))
        self.rest = Leaves(self)
        self.commuting = commuting if len(operands) > 1 and operands[0] is not operands[1] else frozenset()
        self.swapped = Swapped(self)

    def operands(self) -> list[Core]:
        return [core for _, core in sorted((*self.leaves, *self.nested), key=lambda pair: pair[0])]

    def enter(self, search: Search, value: Any) -> bool:
        if not isinstance(value, fx.Node) or value.op != "call_function" or value.target not in self.rows:
            return search.fail(value, lambda: self._wrong_op(value))
        known = search.taken.get(self.id)
        if known is not None:
            return known is value or search.fail(
                value,
                lambda: Said(
                    f"{self.text} stands for {known.name} already, so it cannot be {value.name} too;"
                    " if they are two nodes, name them apart with .named()"
                ),
            )
        if value in search.nodes:
            return search.fail(value, lambda: Said(f"{value.name} is part of the match already"))
        if not (self.shared or value is search.root) and not self._is_free(search, value):
            return False
        search.claim(self, value)
        if self.name is not None and not search.bind(self.name, value):
            return False
        if self.checks and not self._attributes_fit(search, value):
            return False
        if value.target in self.commuting and value.kwargs.get("alpha", 1) == 1:
            search.choose(self.swapped, value)
        return self.enter_operands(search, self.values_of(value))

    def _is_free(self, search: Search, node: fx.Node) -> bool:
        if len(node.users) > self.max_users:
            other = next((user for user in node.users if user not in search.nodes), node)
            return search.reject(node, lambda: UsedElsewhere(node, other))
        owner = search.owner_of(node)
        return owner is None or search.reject(node, lambda: owner)

    def _wrong_op(self, value: Any) -> Cause:
        return WrongOp(value, tuple(map(target_name, self.rows)), f"expected {self.text}, found {show(value)}")

    def _attributes_fit(self, search: Search, node: fx.Node) -> bool:
        rows = self.rows[node.target]
        for name, check, positions in self.checks:
            actual = argument_at(node, positions[node.target], rows)
            if has_node(actual):
                return search.fail(node, lambda: ComputedArgument(node, name, check))  # noqa: B023
            if not check.accepts(actual):
                return search.fail(node, lambda: WrongArguments(node, self._faults(node)))
        return True

    def _faults(self, node: fx.Node) -> tuple[Fault, ...]:
        """Every argument that does not fit, so that all can be reported at once."""
        rows = self.rows[node.target]
        found = ((name, argument_at(node, at[node.target], rows), check) for name, check, at in self.checks)
        return tuple(
            Fault(name, actual, check)
            for name, actual, check in found
            if not has_node(actual) and not check.accepts(actual)
        )

    def values_of(self, node: fx.Node) -> tuple[Any, ...]:
        """A node's values for the operands of this pattern (and perhaps more), defaults filled in."""
        args = node.args
        if len(args) >= self.arity:
            return args
        kwargs = node.kwargs
        missing = self.rows[node.target][len(args) : self.arity]
        return (*args, *(kwargs.get(name, default) for name, default in missing))

    def enter_operands(self, search: Search, values: tuple[Any, ...]) -> bool:
        """Nodes first, then leaves: a refusal should come from as far into the pattern as possible."""
        if not self.nested:
            return self.enter_leaves(search, values)
        if self.leaves:
            search.push(self.rest, values)
        for index, core in self.nested:
            search.push(core, values[index])
        return True

    def enter_leaves(self, search: Search, values: tuple[Any, ...]) -> bool:
        return all(core.enter(search, values[index]) for index, core in self.leaves)


class Leaves(Core):
    """The leaf operands of an op; the value is the tuple of all its operands."""

    __slots__ = ("core",)

    def __init__(self, core: OpCore) -> None:
        super().__init__(-1, None, frozenset(), frozenset())
        self.core = core

    def enter(self, search: Search, value: Any) -> bool:
        return self.core.enter_leaves(search, value)


class Swapped(Core):
    """The operands of a commutative op, swapped. The node itself is claimed already."""

    __slots__ = ("core",)

    def __init__(self, core: OpCore) -> None:
        super().__init__(-1, None, frozenset(), frozenset())
        self.core = core

    def enter(self, search: Search, value: Any) -> bool:
        first, second, *others = self.core.values_of(value)
        return self.core.enter_operands(search, (second, first, *others))


class AltCore(Core):
    """The first of several cores that fits."""

    __slots__ = ("options",)

    def __init__(self, number: int, options: tuple[Core, ...]) -> None:
        heads: Heads = frozenset()
        for option in options:
            heads = None if heads is None or option.heads is None else heads | option.heads
        least = min((option.least for option in options), key=len)
        most = max((option.most for option in options), key=len)
        super().__init__(number, heads, least, most)
        self.options = options

    def enter(self, search: Search, value: Any) -> bool:
        for option in reversed(self.options[1:]):
            search.choose(option, value)
        search.push(self.options[0], value)
        return True


class ItemsCore(Core):
    """A list, item by item."""

    __slots__ = ("items",)

    def __init__(self, number: int, items: tuple[Core, ...]) -> None:
        least = frozenset[int]().union(*(item.least for item in items))
        most = frozenset[int]().union(*(item.most for item in items))
        super().__init__(number, None, least, most)
        self.items = items

    def enter(self, search: Search, value: Any) -> bool:
        if not isinstance(value, list | tuple) or len(value) != len(self.items):
            return search.fail(value, lambda: Said(f"expected a list of {len(self.items)}, found {show(value)}"))
        for core, item in zip(reversed(self.items), reversed(value), strict=True):
            search.push(core, item)
        return True


class LiteralCore(Core):
    """A plain value."""

    __slots__ = ("value",)

    def __init__(self, number: int, value: Plain) -> None:
        super().__init__(number, None, frozenset(), frozenset())
        self.value = value

    def enter(self, search: Search, value: Any) -> bool:
        return same(self.value, value) or search.fail(value, lambda: self._wrong_value(value))

    def _wrong_value(self, value: Any) -> Cause:
        return WrongValue(value, self.value, f"expected {self.value!r}, found {show(value)}")


class LeafCore(Core):
    """A value from outside the match."""

    __slots__ = ("is_anything", "kind", "leaf", "name")

    def __init__(self, number: int, leaf: Leaf) -> None:
        super().__init__(number, None, frozenset(), frozenset())
        self.leaf = leaf
        self.kind = leaf.kind
        self.name = leaf.name
        self.is_anything = leaf.is_anything

    def enter(self, search: Search, value: Any) -> bool:
        if self.is_anything:
            return True
        if value is None and self.leaf.may_be_absent:
            return search.bind(self.name, None)
        if not self._fits(search, value):
            return search.fail(value, lambda: self._wrong_operand(value))
        if (self.leaf.dtypes or self.leaf.ranks) and (reason := why_not_type(value, self.leaf)) is not None:
            return search.fail(value, lambda: reason)
        return search.bind(self.name, tuple(value) if isinstance(value, list | tuple) else value)

    def _fits(self, search: Search, value: Any) -> bool:
        if self.kind is LeafKind.VALUE:
            return is_tensor_node(value)
        if self.kind is LeafKind.CONST:
            return isinstance(value, fx.Node) and search.is_constant(value)
        if self.kind is LeafKind.NUMBER:
            return type(value) is int or type(value) is float
        return isinstance(value, list | tuple) and all(isinstance(item, fx.Node) for item in value)

    def _wrong_operand(self, value: Any) -> Cause:
        wanted = NOUNS[self.kind] if self.name == "_" else f"{NOUNS[self.kind]} for {self.name}"
        return WrongOperand(value, self.kind, self.name, f"expected {wanted}, found {show(value)}")
