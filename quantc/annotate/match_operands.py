"""The operands of a match, by the names that its rule gives roles to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from quantc.annotate.backend import LIKE, PASS
from quantc.ir.dialect import Trait, traits_of
from quantc.ir.site_index import operand_nodes

if TYPE_CHECKING:
    from quantc.patterns.match import Match


@dataclass(frozen=True, slots=True)
class Slot:
    """An operand of a matched node that the match binds by a name: the node, which operand, what it reads, as what."""

    name: str
    node: fx.Node
    operand: int
    value: fx.Node
    role: str


def slots_of(match: Match) -> Iterator[Slot]:
    """The operands of a match that come from outside it, by the names the pattern gives them."""
    roles = match.rule.roles
    names: dict[fx.Node, list[str]] = {}
    for name in roles:
        bound = match.bindings.get(name)
        for value in bound if isinstance(bound, tuple) else (bound,):
            if isinstance(value, fx.Node) and value not in match.nodes:
                names.setdefault(value, []).append(name)
    for node in match.nodes:
        counts: dict[fx.Node, int] = {}
        for operand, value in enumerate(operand_nodes(node)):
            if value not in names:
                continue
            # the same tensor under two names: they come in the order they are written
            nth = counts[value] = counts.get(value, -1) + 1
            name = names[value][min(nth, len(names[value]) - 1)]
            yield Slot(name, node, operand, value, roles[name])


def follows(match: Match) -> bool:
    """Whether a match hands on what it is given, rather than asking for it."""
    return PASS in match.rule.roles.values()


def moves(match: Match) -> bool:
    """Whether the result of a match has the scale of an operand."""
    return match.rule.roles.get("out", "").startswith(LIKE)


def keeps_values(match: Match) -> bool:
    """Whether a match moves values about and changes none: what it hands on is nothing of its own."""
    return all(Trait.PRESERVES_VALUES in traits_of(node) for node in match.nodes)
