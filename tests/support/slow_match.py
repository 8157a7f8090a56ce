"""A matcher written for clarity alone, to hold the real one against.

It writes a pattern out as plain tuples, tries every order and every alternative, and keeps what obeys the rules of
the language. It shares no code with `quantc.patterns` beyond the classes patterns are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantc.patterns import Match, Pattern
from quantc.patterns.dsl import AnyOf, Chain, Operand, OpPattern, OptionalNode, Shared
from quantc.patterns.operand_patterns import ANYTHING, Leaf, LeafKind

COMMUTING = ("add", "mul")


@dataclass(frozen=True)
class Call:
    """A node of the pattern, chains and optional nodes written out."""

    ops: tuple[str, ...]
    operands: tuple[Term, ...]
    name: str | None
    shared: bool


@dataclass(frozen=True)
class Either:
    options: tuple[Term, ...]


Term = Call | Either | Leaf
Feed = Callable[[bool], Term]


def term(pattern: Operand, feed: Feed | None = None, shared: bool = False) -> Term:
    """`pattern` written out, with `feed` in the place of its first operand."""
    match pattern:
        case Leaf():
            return pattern
        case OpPattern(operands=operands):
            rest = tuple(term(item, None, shared) for item in operands)
            return Call(pattern.ops, (feed(shared), *rest[1:]) if feed else rest, pattern.name, shared)
        case Chain(steps=steps):
            for step in steps:
                feed = _fed(step, feed)
            assert feed is not None
            return feed(shared)
        case OptionalNode(inner=OpPattern(operands=operands) as inner):
            return either(term(inner, feed, shared), feed(shared) if feed else term(operands[0]))
        case AnyOf(options=options):
            return either(*(term(option, feed, shared) for option in options))
        case Shared(inner=inner):
            return term(inner, feed, True)
        case _:
            raise AssertionError(pattern)


def _fed(step: Pattern, feed: Feed | None) -> Feed:
    return lambda shared: term(step, feed, shared)


def either(*options: Term) -> Term:
    items = [item for option in options for item in (option.options if isinstance(option, Either) else (option,))]
    unique = tuple(dict.fromkeys(items))
    return unique[0] if len(unique) == 1 else Either(unique)


Env = dict[Any, Any]
"""From names to what they are bound to, and from calls of the pattern to nodes."""


def fits(part: Term, found: Any, env: Env) -> Iterator[Env]:
    """Every way a part can stand for what was found."""
    match part:
        case Leaf(name=name, kind=kind):
            if part == ANYTHING:
                yield env
            elif not isinstance(found, fx.Node) or (kind is LeafKind.CONST and found.op != "get_attr"):
                return
            elif env.get(name, found) is found:
                yield {**env, name: found}
        case Either(options=options):
            for option in options:
                yield from fits(option, found, env)
        case Call():
            yield from _fits_call(part, found, env)


def op_of(node: fx.Node) -> str:
    return node.name.split("_")[0]


def _fits_call(part: Call, found: Any, env: Env) -> Iterator[Env]:
    if not isinstance(found, fx.Node) or found.op != "call_function" or op_of(found) not in part.ops:
        return
    if part in env:
        if env[part] is found:
            yield env
        return
    if found in [node for key, node in env.items() if isinstance(key, Call)]:
        return
    if part.name is not None and env.get(part.name, found) is not found:
        return
    deeper: Env = {**env, part: found}
    if part.name is not None:
        deeper[part.name] = found
    for order in orders(found):
        envs = [deeper]
        for operand, item in zip(part.operands, order, strict=False):
            envs = [after for before in envs for after in fits(operand, item, before)]
        yield from envs


def orders(node: fx.Node) -> list[list[Any]]:
    scaled = "alpha" in node.kwargs
    values = list(node.args) if scaled else [*node.args, *node.kwargs.values()]
    return [values, values[::-1]] if op_of(node) in COMMUTING and not scaled else [values]


def call_names(part: Term) -> set[str | None]:
    match part:
        case Call(name=name, operands=operands):
            return {name}.union(*map(call_names, operands))
        case Either(options=options):
            return set[str | None]().union(*map(call_names, options))
        case _:
            return set()


@dataclass(frozen=True)
class Solution:
    bindings: dict[str, Any]
    claimed: frozenset[fx.Node]

    def is_like(self, match: Match) -> bool:
        bound = {name: found for name, found in match.bindings.items() if found is not None}
        return bound == self.bindings and self.claimed == frozenset(match.nodes)


def solutions(pattern: Pattern, root: fx.Node) -> list[Solution]:
    """Every match of a pattern at a root: nothing it claims is used outside, no value comes from inside."""
    whole = term(pattern)
    names = call_names(whole)
    kept = []
    for env in fits(whole, root, {}) if root.op == "call_function" else ():
        claimed = frozenset(node for key, node in env.items() if isinstance(key, Call) and not key.shared)
        bindings = {name: found for name, found in env.items() if isinstance(name, str)}
        leaks = any(node is not root and not claimed.issuperset(node.users) for node in claimed)
        inside = any(found in claimed for name, found in bindings.items() if name not in names)
        if not leaks and not inside:
            kept.append(Solution(bindings, claimed))
    return kept
