"""Semantics table: integer lowering and formula of each quantized op.

Each row names ops of the dialect, gives the formula they are held to, and writes the integer ops that implement it. The
lowering, the docs page and the conformance kit all read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torch import fx

from quantc.errors import PluginError
from quantc.integer.match_lowering import Task
from quantc.ir.dialect import op_name
from quantc.spec.formats import Timing

Write = Callable[[Task], None]


@dataclass(frozen=True, eq=False)
class Semantics:
    """Integer semantics of some ops of the dialect."""

    ops: tuple[str, ...]
    formula: str
    write: Write
    """Replaces the match; raises NotIntegerError, before anything is changed, if it cannot."""
    deviation: str = ""
    """The most the result can be off, beyond one rounding of the exact value. Empty: nothing."""
    timing: Timing = Timing.STATIC


SEMANTICS: dict[str, Semantics] = {}
"""By the name of the op a match begins with."""
DYNAMIC: dict[str, Semantics] = {}
"""The same, for dynamically quantized ops."""


def computes(*ops: str, formula: str, deviation: str = "", timing: Timing = Timing.STATIC) -> Callable[[Write], Write]:
    """Add a row: `@computes("linear", formula="acc = Σ …")` on the function that writes it."""
    table = DYNAMIC if timing is Timing.DYNAMIC else SEMANTICS

    def add(write: Write) -> Write:
        row = Semantics(ops, formula, write, deviation, timing)
        for op in ops:
            if op in table:
                raise ValueError(f"{op} has two rows")
            table[op] = row
        return write

    return add


def semantics_of(node: fx.Node, timing: Timing = Timing.STATIC, own: str = "") -> Semantics | None:
    """Row of an op: of those at `own` (`module:NAME`), or of the table; weight-only ops use the static rows, which
    refuse what they cannot lower."""
    load()
    for row in rows_at(own) if own else ():
        if op_name(node) in row.ops and (row.timing is Timing.DYNAMIC) is (timing is Timing.DYNAMIC):
            return row
    return (DYNAMIC if timing is Timing.DYNAMIC else SEMANTICS).get(op_name(node))


def rows_at(place: str) -> tuple[Semantics, ...]:
    """Rows of a target, by their place `module:NAME`. PluginError if they are not there."""
    module, _, name = place.partition(":")
    try:
        rows = tuple(getattr(import_module(module), name))
    except (ImportError, AttributeError, TypeError) as error:
        raise PluginError(
            f"there are no semantics at {place}: {error}",
            where=f"semantics={place!r}",
            advice="install the target's package; the place is module:NAME of a list of rows",
        ) from error
    wrong = [row for row in rows if not isinstance(row, Semantics)]
    if wrong:
        raise PluginError(f"{place} holds {wrong[0]!r}, which is no quantc.integer.semantics.Semantics")
    return rows


def load() -> None:
    """Import the modules that fill the table."""
    for name in MODULES:
        import_module(f"quantc.integer.{name}")


MODULES = (
    "lowerings.lower_products",
    "lowerings.lower_moves",
    "lowerings.lower_joins",
    "lowerings.lower_elementwise",
    "lowerings.lower_reductions",
    "lowerings.lower_activations",
    "lowerings.lower_norms",
    "lowerings.lower_embedding",
    "lowerings.lower_dynamic",
    "lowerings.lower_recurrent",
    "ops.weight_only",
)
