"""The `plan` section of a text. The facts of a plan are those of layers above, and so is their form, which registers itself
here and is imported where a program has a plan, or a text has the section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.text.lexer import Reader

KEYWORD = "plan"


@dataclass(frozen=True)
class PlanForm:
    """Writer and parser of the lines of a plan."""

    write: Callable[[Program], Iterator[str]]
    tensors: Callable[[Program], dict[str, torch.Tensor]]
    read: Callable[[Program, Reader, Sequence[Reader], Mapping[str, torch.Tensor], Mapping[str, Any]], None]


PLAN_FORM: list[Callable[[], PlanForm]] = []
"""Filled from above, by one function that imports the form: `quantc` itself does so."""


def _form() -> PlanForm:
    (load,) = PLAN_FORM
    return load()


@dataclass
class PlanSection:
    """The lines of a plan in a text, unread."""

    start: Reader
    rows: list[Reader] = field(default_factory=list)

    def read_into(
        self, program: Program, constants: Mapping[str, torch.Tensor] | None, quantizers: Mapping[str, Any]
    ) -> None:
        """Give a program the plan of these lines."""
        _form().read(program, self.start, self.rows, constants or {}, quantizers)


def plan_lines(program: Program) -> Iterator[str]:
    """The lines of a program's plan, the keyword first; none where nothing was decided."""
    if program.plan != Plan() and (facts := [*_form().write(program)]):
        yield KEYWORD
        yield from facts


def plan_tensors(program: Program) -> dict[str, torch.Tensor]:
    """The tensors of a plan, by the names they have in the text."""
    return {} if program.plan == Plan() else _form().tensors(program)
