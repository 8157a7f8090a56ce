"""Arguments of ops in generated models: `Wanted` holds what the pattern fixes, an example supplies the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantc.ir.dialect import BY_TARGET, Argument, arguments
from quantc.patterns.checks import Check, Comparison
from quantc.patterns.op_names import op_target
from quantc.testing.choices import Choices, NoExampleError

BATCH = 4
CHANNELS = 8
SHAPES: dict[int, tuple[int, ...]] = {
    1: (16,),
    2: (BATCH, 16),
    3: (BATCH, CHANNELS, 16),
    4: (BATCH, CHANNELS, 8, 8),
    5: (BATCH, CHANNELS, 4, 4, 4),
}
PARAMETERS = frozenset({"w", "b", "mean", "var", "params", "w_ih", "w_hh", "b_ih", "b_hh"})
"""Operands that are constants in most models; other tensors come from outside."""


@dataclass
class Wanted:
    """A call under construction: the arguments that the pattern fixes, by their names in the dialect."""

    op: str
    known: dict[str, Any]
    """Tensors and plain values; None for what is absent; in lists, None for an item that is still to be made."""
    checks: Mapping[str, Check]
    rank: int | None
    """Number of axes that the reader of the result prefers."""
    choices: Choices
    random: torch.Generator

    @property
    def rows(self) -> tuple[Argument, ...]:
        return arguments(op_target(self.op))

    def lacks(self, name: str) -> bool:
        """True if the pattern requires an optional operand to be absent."""
        return name in self.known and self.known[name] is None

    def tensor(self, name: str) -> Tensor | None:
        """An operand that is already made; None if it is not."""
        value = self.known.get(name)
        return value if isinstance(value, Tensor) else None

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def whole(self, high: int, *shape: int) -> Tensor:
        """Random integers from 0 to below `high`."""
        return torch.randint(0, high, shape, generator=self.random)

    def weight(self, *shape: int) -> Tensor:
        """Random weight with the scale of a trained one, so that a GEMM's result is about as large as its input."""
        fan_in = max(1, torch.Size(shape[1:]).numel())
        return self.randn(*shape) / math.sqrt(fan_in)

    def x(self, name: str = "x", rank: int | None = None, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """The operand if it is already made, else a new one: of `rank` axes, or as many as required."""
        made = self.tensor(name)
        if made is None:
            return self.randn(*(shape or SHAPES[rank or self.rank or 4]))
        if rank is not None and made.dim() != rank:
            raise NoExampleError(f"{self.op} reads {rank} axes, and what feeds it has {made.dim()}")
        return made

    def choose(self, what: str, *values: Any) -> Any:
        """One of several values, each of which has to be shown."""
        return values[self.choices.take(f"{self.op} {what}", *(f"{self.op} with {what}={value}" for value in values))]

    def attr(self, name: str, *values: Any) -> Any:
        """A value that the pattern's checks accept: one of `values`, each shown in turn, else what they ask for."""
        if name in self.known:
            return self.known[name]
        check = self.checks.get(name)
        fitting = [value for value in values if check is None or check.accepts(value)]
        if len(fitting) > 1:
            return self.choose(name, *fitting)
        if fitting or check is None:
            return fitting[0] if fitting else None
        return self._asked(name, check)

    def _asked(self, name: str, check: Check) -> Any:
        width = next((row.width for row in self.rows if name in (row.name, row.aten_name)), None)
        if check.comparison is Comparison.ONE_OF and isinstance(check.value, tuple):
            return _wide(self.choose(name, *check.value), width)
        tries: tuple[Any, ...] = (check.value, 2, 1, 0, 0.5, 2.0, False, True)
        accepted = [wide for value in tries if check.accepts(wide := _wide(value, width))]
        if not accepted:
            raise NoExampleError(f"{self.op}: no value of {name} that is {check} is known")
        return accepted[0]

    def axis(self, x: Tensor, name: str = "dim", *values: int) -> int:
        """An axis of `x` that the checks accept."""
        axis = int(self.attr(name, *(value for value in values or (1, 0) if -x.dim() <= value < x.dim())))
        return axis if axis >= 0 else axis + x.dim()


def _wide(value: Any, width: int | None) -> Any:
    """A plain value as an argument has it: a lone number stands for as many as the argument takes."""
    if isinstance(value, tuple):
        return list(value)
    return [value] * width if width and isinstance(value, int) else value


Example = Callable[[Wanted], Mapping[str, Any]]
"""Gives the arguments of a call by name; those that are settled already may be given again, and are left out."""


@dataclass(frozen=True)
class ExampleTable:
    """Example arguments by op."""

    rows: dict[str, Example] = field(default_factory=dict)

    def of(self, *ops: str) -> Callable[[Example], Example]:
        """Register a function as the example for some ops."""

        def register(function: Example) -> Example:
            self.rows.update(dict.fromkeys(ops, function))
            return function

        return register

    def complete(self, wanted: Wanted) -> dict[str, Any]:
        """All arguments of a call. NoExampleError if no example for the op is known."""
        example = self.rows.get(wanted.op, _from_schema)
        found = {**example(wanted)}
        found.update({name: value for name, value in wanted.known.items() if not isinstance(value, list)})
        for name, value in wanted.known.items():
            if isinstance(value, list):
                found.setdefault(name, value)
        for row in wanted.rows:
            if row.name in wanted.checks and row.name not in found:
                found[row.name] = wanted.attr(row.name, row.default)
        return found


def _from_schema(wanted: Wanted) -> dict[str, Any]:
    """An op without an example of its own is called with one tensor, and with what its row has for its other arguments."""
    op = BY_TARGET.get(op_target(wanted.op))
    examples = op.examples if op is not None else {}
    needed = (row for row in wanted.rows if not row.has_default and row.name not in examples)
    required = [row for row in needed if row.name not in wanted.known]
    missing = [row.name for row in required[1:] if row.name not in wanted.checks]
    first = wanted.rows[0]
    if first.type != "Tensor" or missing or (required and required[0] is not first):
        names = ", ".join(row.name for row in required)
        raise NoExampleError(f"no example arguments for {wanted.op} (it needs {names})")
    x = wanted.x(first.name)
    return {first.name: x, **{name: wanted.attr(name, *values) for name, values in examples.items()}}
