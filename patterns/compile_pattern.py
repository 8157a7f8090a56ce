"""Compilation of patterns to matcher nodes (cores).

Chains and optional nodes disappear: each step is substituted for the next one's first operand, and an optional step
becomes a choice between itself and its input. Equal parts are interned as one core, which is what makes equal
sub-patterns stand for the same node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quantc.errors import PatternError
from quantc.ir.dialect import BY_TARGET, arguments, position
from quantc.ir.op_row import Trait
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
from quantc.patterns.matcher_nodes import AltCore, ItemsCore, LeafCore, LiteralCore, OpCore
from quantc.patterns.op_names import op_target
from quantc.patterns.operand_patterns import ANYTHING, Leaf, LiteralValue
from quantc.patterns.pattern_search import Core

GETITEM_ROWS: tuple[tuple[str, Any], ...] = (("a", None), ("b", None))


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled pattern."""

    root: Core
    roots: dict[Any, tuple[tuple[frozenset[Any], ...], ...]]
    """For each call target of the root: the alternatives to start, each as the sets of targets that must feed it."""
    targets: frozenset[Any]
    """Every call target the pattern mentions."""
    names: tuple[str, ...]
    """Every name it binds, in the order they are written."""
    value_names: tuple[str, ...]
    """The names of values from outside the match."""
    required: int
    """The number of nodes of the smallest match."""
    largest: int
    """The number of nodes of the largest match."""

    def may_start(self, target: Any, feeds: frozenset[Any]) -> bool:
        """True if a node could be the root, judged by its own target and those of the nodes that feed it."""
        return any(
            all(not heads.isdisjoint(feeds) for heads in needed)  # each operand that must be an op is fed by one
            for needed in self.roots.get(target, ())
        )


class Feed(NamedTuple):
    """The part of a chain built so far: as nodes the match claims, and as nodes it only inspects."""

    claimed: Core
    looked_at: Core


@dataclass(eq=False)
class _Builder:
    """Interns each distinct core."""

    cores: dict[Hashable, Core] = field(default_factory=dict)
    done: dict[Hashable, tuple[Operand, Core]] = field(default_factory=dict)
    """By identity; the pattern is kept alive so that its id is not reused."""
    names: dict[str, None] = field(default_factory=dict)
    node_names: set[str] = field(default_factory=set)

    def lower(self, pattern: Operand, feed: Feed | None, shared: bool) -> Core:
        """The core of `pattern`, its first operand taken from `feed` if there is one."""
        key = (id(pattern), feed and (feed.claimed.id, feed.looked_at.id), shared)
        if key not in self.done:
            self.done[key] = (pattern, self._lower(pattern, feed, shared))
        return self.done[key][1]

    def _lower(self, pattern: Operand, feed: Feed | None, shared: bool) -> Core:
        match pattern:
            case Leaf():
                return self._leaf(pattern)
            case LiteralValue(value=value):
                return self._intern(("literal", pattern.key), lambda number: LiteralCore(number, value))
            case OpPattern():
                return self._op(pattern, feed, shared)
            case Result(inner=inner, index=index, name=name):
                picked = ANYTHING if index is None else LiteralValue(index)
                operands = (self.lower(inner, feed, shared), self.lower(picked, None, shared))
                return self._getitem(operands, name, shared)
            case Chain(steps=steps):
                for step in steps:
                    feed = Feed(self.lower(step, feed, shared), self.lower(step, feed, True))
                return _core_of(feed, shared)
            case OptionalNode(inner=inner):
                present = self.lower(inner, feed, shared)
                absent = _core_of(feed, shared) if feed is not None else self._open(inner)
                return self._alt((present, absent))
            case AnyOf(options=options):
                return self._alt(tuple(self.lower(option, feed, shared) for option in options))
            case Shared(inner=inner):
                return self.lower(inner, feed, True)
            case Items(items=items):
                cores = tuple(self.lower(item, None, shared) for item in items)
                key = ("items", *(core.id for core in cores))
                return self._intern(key, lambda number: ItemsCore(number, cores))
            case _:
                raise PatternError(
                    f"{pattern!r} is not a pattern", advice="build patterns with op(), any_of() and so on"
                )

    def _intern(self, key: Hashable, make: Callable[[int], Core]) -> Core:
        if key not in self.cores:
            self.cores[key] = make(len(self.cores))
        return self.cores[key]

    def _leaf(self, leaf: Leaf) -> Core:
        if leaf.name != "_":
            self.names.setdefault(leaf.name)
        return self._intern(("leaf", leaf), lambda number: LeafCore(number, leaf))

    def _op(self, pattern: OpPattern, feed: Feed | None, shared: bool) -> Core:
        targets = [op_target(name) for name in pattern.ops]
        commuting = frozenset(
            target for target in targets if target in BY_TARGET and Trait.COMMUTES in BY_TARGET[target].traits
        )
        given = pattern.operands or ((ANYTHING,) if feed is not None else ())
        if commuting and len(given) == 1:
            given = (*given, ANYTHING)  # a lone operand may be on either side too
        operands = tuple(
            _core_of(feed, shared) if feed is not None and index == 0 else self.lower(operand, None, shared)
            for index, operand in enumerate(given)
        )
        rows: dict[Any, tuple[tuple[str, Any], ...]] = {
            target: tuple((row.aten_name, row.default) for row in arguments(target)) for target in targets
        }
        checks = tuple(
            (name, check, {target: position(target, name) for target in targets}) for name, check in pattern.where
        )
        self._note_node(pattern.name)
        key = ("op", pattern.ops, tuple(core.id for core in operands), pattern.where, pattern.name, shared)
        return self._intern(
            key,
            lambda number: OpCore(
                number,
                rows,
                operands,
                text=_join_names(pattern.ops),
                name=pattern.name,
                checks=checks,
                shared=shared,
                commuting=commuting,
            ),
        )

    def _getitem(self, operands: tuple[Core, ...], name: str | None, shared: bool) -> Core:
        self._note_node(name)
        return self._intern(
            ("getitem", tuple(core.id for core in operands), name, shared),
            lambda number: OpCore(
                number,
                {operator.getitem: GETITEM_ROWS},
                operands,
                text="an output of an op with several",
                name=name,
                checks=(),
                shared=shared,
                commuting=frozenset(),
            ),
        )

    def _note_node(self, name: str | None) -> None:
        if name is not None:
            self.names.setdefault(name)
            self.node_names.add(name)

    def _alt(self, options: tuple[Core, ...]) -> Core:
        flat: dict[int, Core] = {}
        for option in options:
            for core in option.options if isinstance(option, AltCore) else (option,):
                flat.setdefault(core.id, core)
        cores = tuple(flat.values())
        if len(cores) == 1:
            return cores[0]
        return self._intern(("alt", *flat), lambda number: AltCore(number, cores))

    def _open(self, pattern: Operand) -> Core:
        """The substitute for a missing optional node with nothing chained into it: its own operand."""
        match pattern:
            case OpPattern():
                return self.lower(open_operand(pattern), None, False)
            case Chain(steps=(first, *_)):
                return self._open(first)
            case AnyOf(options=options):
                return self._alt(tuple(self._open(option) for option in options))
            case OptionalNode(inner=inner) | Shared(inner=inner) | Result(inner=inner):
                return self._open(inner)
            case _:
                raise PatternError(f"{pattern} takes no operand, so it cannot be optional")


def _core_of(feed: Feed | None, shared: bool) -> Core:
    if feed is None:
        raise PatternError("an empty chain stands for nothing", advice="write a >> b")
    return feed.looked_at if shared else feed.claimed


def _join_names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def compile_pattern(pattern: Pattern) -> Compiled:
    """Compile a pattern. PatternError if it could match without any node."""
    builder = _Builder()
    root = builder.lower(pattern, None, False)
    ops = [core for core in reachable(root) if isinstance(core, OpCore)]
    variants = [core for core in (root.options if isinstance(root, AltCore) else (root,)) if isinstance(core, OpCore)]
    if not root.least or isinstance(root, ItemsCore):
        raise PatternError(f"{pattern} can match without any node", advice="let at least one op be required")
    if any(core.shared for core in variants):
        raise PatternError(
            f"the root of {pattern} is shared, so a match would claim nothing", advice="share inner nodes only"
        )
    _count_users(ops)
    roots: dict[Any, tuple[tuple[frozenset[Any], ...], ...]] = {}
    for core in variants:
        needed = tuple(heads for heads in _operand_heads(core) if heads is not None)
        for target in core.rows:
            roots[target] = (*roots.get(target, ()), needed)
    return Compiled(
        root=root,
        roots=roots,
        targets=frozenset(target for core in ops for target in core.rows),
        names=tuple(builder.names),
        value_names=tuple(name for name in builder.names if name not in builder.node_names),
        required=len(root.least),
        largest=len(root.most),
    )


def children(core: Core) -> tuple[Core, ...]:
    match core:
        case OpCore():
            return tuple(core.operands())
        case AltCore(options=parts) | ItemsCore(items=parts):
            return parts
        case _:
            return ()


def reachable(root: Core) -> list[Core]:
    """Every core of a pattern, each once."""
    found: dict[int, Core] = {}
    pending = [root]
    while pending:
        core = pending.pop()
        if core.id not in found:
            found[core.id] = core
            pending.extend(children(core))
    return list(found.values())


def _direct(core: Core) -> Iterator[Core]:
    """The ops and leaves an operand can be, through choices and lists."""
    pending = [core]
    while pending:
        part = pending.pop()
        if isinstance(part, AltCore | ItemsCore):
            pending.extend(children(part))
        else:
            yield part


def _operand_heads(core: OpCore) -> Iterator[frozenset[Any] | None]:
    for operand in core.operands():
        if isinstance(operand, ItemsCore):
            yield from (item.heads for item in operand.items)
        else:
            yield operand.heads


def _count_users(ops: list[OpCore]) -> None:
    """Bound the users of each inner op inside a match: by the number of ops that it, or its name, is an operand of."""
    by_id: dict[int, set[int]] = {core.id: set() for core in ops}
    by_name: dict[str, set[int]] = {}
    for core in ops:
        for part in {part.id: part for operand in core.operands() for part in _direct(operand)}.values():
            if isinstance(part, OpCore):
                by_id[part.id].add(core.id)
            elif isinstance(part, LeafCore):
                by_name.setdefault(part.name, set()).add(core.id)
    for core in ops:
        named = by_name.get(core.name, set()) if core.name is not None else set()
        core.max_users = len(by_id[core.id] | named)
