"""The operands of a match that its rule assigns roles to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from quantc.annotate.backend import LIKE, PASS
from quantc.ir.dialect import traits_of
from quantc.ir.op_row import Trait
from quantc.ir.site_index import operand_nodes

if TYPE_CHECKING:
    from quantc.patterns.rule import Match


@dataclass(frozen=True, slots=True)
class Slot:
    """An operand of a matched node, bound to a name: the node, the operand index, the value read, and the role."""

    name: str
    node: fx.Node
    operand: int
    value: fx.Node
    role: str


def slots_of(match: Match) -> Iterator[Slot]:
    """The operands of a match from outside it, by the names in the pattern."""
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
            # one tensor under two names: assign them in the order they are written
            nth = counts[value] = counts.get(value, -1) + 1
            name = names[value][min(nth, len(names[value]) - 1)]
            yield Slot(name, node, operand, value, roles[name])


def follows(match: Match) -> bool:
    """True if the rule propagates its input's quantization instead of requesting its own."""
    return PASS in match.rule.roles.values()


def moves(match: Match) -> bool:
    """True if the result of a match has the scale of an operand."""
    return match.rule.roles.get("out", "").startswith(LIKE)


def keeps_values(match: Match) -> bool:
    """True if every op of a match preserves values: it moves elements and computes none."""
    return all(Trait.PRESERVES_VALUES in traits_of(node) for node in match.nodes)
