"""The pattern language. A pattern is a frozen value: it compares, hashes, prints and serializes to JSON.

    conv = op("conv1d", "conv2d", "conv3d", args="x w b?")
    clamp = op("relu", "clamp", args="_")
    conv >> optional(clamp)               # a chain: clamp's first operand is conv
    add(conv >> optional(clamp), "y")     # operands; in either order where the op commutes

Two rules give patterns their meaning as graphs. The same name bound twice is the same value; equal sub-patterns are the
same node (to match two convolutions, name them apart: `conv.named("left")`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from quantc.errors import PatternError, suggest
from quantc.ir.dialect import arguments, position, target_name
from quantc.patterns.checks import Check, Comparison
from quantc.patterns.op_names import has_many_outputs, op_target
from quantc.patterns.operand_patterns import ANYTHING, Leaf, LiteralValue, leaf

MAX_DEPTH = 64
"""Maximum nesting of patterns; a chain counts one for each step."""
MAX_SIZE = 4000
"""Maximum number of parts of a pattern, a part used twice counting twice."""

Operand: TypeAlias = "Leaf | LiteralValue | Pattern"


@dataclass(frozen=True, repr=False)
class Pattern(ABC):
    """Base of patterns over nodes."""

    depth: int = field(init=False, compare=False)
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        nested = [part for part in self.parts() if isinstance(part, Pattern)]
        depths = [part.depth for part in nested]
        depth = sum(depths) if isinstance(self, Chain) else 1 + max(depths, default=0)
        size = 1 + len(list(self.parts())) + sum(part.size for part in nested)
        if depth > MAX_DEPTH or size > MAX_SIZE:
            raise PatternError(
                f"the pattern is too large: {depth} levels (at most {MAX_DEPTH}), {size} parts (at most {MAX_SIZE})",
                advice="split it into several rules",
            )
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "size", size)

    @abstractmethod
    def parts(self) -> Iterator[Operand]:
        """The direct sub-patterns."""

    @abstractmethod
    def named(self, name: str) -> Pattern:
        """Bind the node this pattern stands for (of a chain: the last one) to `name`."""

    def __rshift__(self, consumer: object) -> Chain:
        if not isinstance(consumer, Pattern):
            raise PatternError(f"{consumer!r} cannot follow in a chain", advice="chain op patterns: conv >> relu")
        return Chain((*_steps(self), *_steps(consumer)))

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class OpPattern(Pattern):
    """A call of one of `ops`. Operands that are not given match anything."""

    ops: tuple[str, ...]
    operands: tuple[Operand, ...] = ()
    where: tuple[tuple[str, Check], ...] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ops:
            raise PatternError("an op pattern needs at least one op", advice='name it: op("relu")')
        names = (target_name(op_target(name)) for name in self.ops)
        object.__setattr__(self, "ops", tuple(dict.fromkeys(names)))
        object.__setattr__(self, "where", tuple(sorted(self.where, key=lambda row: row[0])))
        for name in self.ops:
            rows = arguments(op_target(name))
            if len(self.operands) > len(rows):
                raise PatternError(
                    f"{name} takes {len(rows)} arguments, the pattern gives {len(self.operands)}",
                    advice=f"its arguments are {', '.join(row.name for row in rows)}",
                )
            for attribute, _ in self.where:
                if position(op_target(name), attribute) < 0:
                    known = [row.name for row in rows]
                    raise PatternError(
                        f"{name} has no argument {attribute!r}", advice=suggest(attribute, known, noun="arguments")
                    )

    def parts(self) -> Iterator[Operand]:
        return iter(self.operands)

    def named(self, name: str) -> OpPattern:
        return replace(self, name=check_name(name))

    def __call__(self, *operands: object) -> OpPattern:
        """The same op with these operands; omitted ones are unchanged."""
        given = tuple(operand(item) for item in operands)
        return replace(self, operands=given + self.operands[len(given) :])

    def having(self, **where: object) -> OpPattern:
        """The same op with further attribute checks; a plain value means equality."""
        return replace(self, where=_checks({**dict(self.where), **where}))

    def __str__(self) -> str:
        text = "|".join(self.ops)
        if self.operands:
            text += f"({', '.join(map(str, self.operands))})"
        if self.where:
            text += f"[{', '.join(f'{name} {check}' for name, check in self.where)}]"
        return f"{self.name}={text}" if self.name else text


@dataclass(frozen=True, repr=False)
class Chain(Pattern):
    """Each step feeds the first operand of the next."""

    steps: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.steps) < 2 or any(isinstance(step, Chain | Items) for step in self.steps):
            raise PatternError("a chain is two steps or more, each of them a node", advice="write a >> b >> c")
        for step in self.steps[1:]:
            check_open(step)

    def parts(self) -> Iterator[Operand]:
        return iter(self.steps)

    def named(self, name: str) -> Chain:
        return Chain((*self.steps[:-1], self.steps[-1].named(name)))

    def __str__(self) -> str:
        return " >> ".join(map(str, self.steps))


@dataclass(frozen=True, repr=False)
class OptionalNode(Pattern):
    """A node that may be missing; its input then takes its place."""

    inner: Pattern

    def __post_init__(self) -> None:
        super().__post_init__()
        check_open(self.inner)

    def parts(self) -> Iterator[Operand]:
        yield self.inner

    def named(self, name: str) -> OptionalNode:
        return OptionalNode(self.inner.named(name))

    def __str__(self) -> str:
        return f"optional({self.inner})"


@dataclass(frozen=True, repr=False)
class AnyOf(Pattern):
    """The first of several patterns that matches."""

    options: tuple[Operand, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.options:
            raise PatternError("any_of needs at least one pattern")

    def parts(self) -> Iterator[Operand]:
        return iter(self.options)

    def named(self, name: str) -> AnyOf:
        return AnyOf(tuple(item.named(name) if isinstance(item, Pattern) else item for item in self.options))

    def __str__(self) -> str:
        return f"any_of({', '.join(map(str, self.options))})"


@dataclass(frozen=True, repr=False)
class Result(Pattern):
    """One of the outputs of an op with several; `index` None is any of them."""

    inner: Pattern
    index: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern in last_ops(self.inner):
            for name in pattern.ops:
                if not has_many_outputs(name):
                    raise PatternError(
                        f"{name} gives a single tensor, so there is no result to pick",
                        advice="match it directly, without result() or out()",
                    )

    def parts(self) -> Iterator[Operand]:
        yield self.inner

    def named(self, name: str) -> Result:
        return replace(self, name=check_name(name))

    def __str__(self) -> str:
        text = f"result({self.inner}, {self.index})" if self.index is not None else f"result({self.inner})"
        return f"{self.name}={text}" if self.name else text


@dataclass(frozen=True, repr=False)
class Shared(Pattern):
    """Nodes that are inspected but not claimed: they may have users outside the match."""

    inner: Pattern

    def parts(self) -> Iterator[Operand]:
        yield self.inner

    def named(self, name: str) -> Shared:
        return Shared(self.inner.named(name))

    def __str__(self) -> str:
        return f"shared({self.inner})"


@dataclass(frozen=True, repr=False)
class Items(Pattern):
    """A list operand, item by item: `cat(["x", "y"])`."""

    items: tuple[Operand, ...]

    def parts(self) -> Iterator[Operand]:
        return iter(self.items)

    def named(self, name: str) -> Pattern:
        raise PatternError(f"a list of operands is not a node, so it cannot be named {name!r}")

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.items))}]"


# -- the words ---------------------------------------------------------------------------------------------------


def op(*names: str, args: str = "", where: Mapping[str, object] | None = None) -> OpPattern:
    """A call of one of the named ops.

    `args` names the operands in the dialect's order: `x` binds a value, `b?` one that may be absent, `xs*` a list,
    `_` anything. `where` checks attributes: a plain value means equality, or use `one_of`, `at_least` and so on.
    """
    return OpPattern(names, tuple(leaf(token) for token in args.split()), _checks(where or {}))


def optional(pattern: Pattern) -> OptionalNode:
    """A node that may be missing: `conv >> optional(relu)` matches `conv` alone too, but prefers both."""
    return OptionalNode(_pattern(pattern, "optional"))


def any_of(*patterns: object) -> AnyOf:
    """The first of several patterns that matches. Operands are allowed: `any_of(const("c"), number("c"))`."""
    return AnyOf(tuple(operand(pattern) for pattern in patterns))


def result(pattern: Pattern, index: int | None = None) -> Result:
    """One output of an op with several, such as `result(op("max"), 1)`."""
    return Result(_pattern(pattern, "result"), index)


def out(name: str, index: int | None = None, *, args: str = "") -> Result:
    """Short for `result(op(name, args=args), index)`."""
    return result(op(name, args=args), index)


def shared(pattern: Pattern) -> Shared:
    """Inspect these nodes without claiming them, so that they may have other users."""
    return Shared(_pattern(pattern, "shared"))


def operand(item: object) -> Operand:
    """Convert an operand to a pattern: a pattern, a name, a number, None, a dtype, or a list of these."""
    if isinstance(item, Pattern | Leaf | LiteralValue):
        return item
    if isinstance(item, str):
        return leaf(item)
    if isinstance(item, list | tuple):
        return Items(tuple(operand(part) for part in item))
    return LiteralValue(item)


def _pattern(item: object, word: str) -> Pattern:
    if isinstance(item, Pattern) and not isinstance(item, Items):
        return item
    raise PatternError(f"{word}() takes a pattern, not {item!r}", advice=f'write {word}(op("relu"))')


def _checks(where: Mapping[str, Any]) -> tuple[tuple[str, Check], ...]:
    return tuple(
        (name, check if isinstance(check, Check) else Check(Comparison.EQUALS, check)) for name, check in where.items()
    )


def check_name(name: str) -> str:
    """Validate a name to bind; `out` always means the root of the match."""
    if not name.isidentifier() or name in ("_", "out"):
        raise PatternError(f"{name!r} cannot be bound", advice="use a Python identifier other than `out` and `_`")
    return name


# -- reading patterns --------------------------------------------------------------------------------------------


def _steps(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.steps if isinstance(pattern, Chain) else (pattern,)


def last_ops(pattern: Operand) -> Iterator[OpPattern]:
    """The op patterns that can be the node `pattern` stands for."""
    pending: list[Operand] = [pattern]
    while pending:
        match pending.pop():
            case OpPattern() as last:
                yield last
            case Chain(steps=steps):
                pending.append(steps[-1])
            case AnyOf(options=options):
                pending.extend(reversed(options))
            case OptionalNode(inner=inner) | Shared(inner=inner):
                pending.append(inner)
            case _:
                continue


def open_operand(pattern: OpPattern) -> Operand:
    """The operand that a chain feeds: the first."""
    return pattern.operands[0] if pattern.operands else ANYTHING


def check_open(pattern: Operand) -> None:
    """Raise PatternError on a chain into a pattern whose first operand is given already."""
    match pattern:
        case OpPattern():
            first = open_operand(pattern)
            if not (isinstance(first, Leaf) and first.is_open):
                raise PatternError(
                    f"the first operand of {pattern} is already {first}, so nothing can be chained into it",
                    advice="give the operands by calling it: add(conv, other)",
                )
        case Chain(steps=steps):
            check_open(steps[0])
        case AnyOf(options=options):
            for option in options:
                check_open(option)
        case OptionalNode(inner=inner) | Shared(inner=inner) | Result(inner=inner):
            check_open(inner)
        case _:
            raise PatternError(f"{pattern} is a value, so nothing can be chained into it")
