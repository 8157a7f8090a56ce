"""The `plan` section of a text. Its facts are those of layers above, and so is its form: it is looked up where a program
has a plan, or a text has the section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.text.lexer import Reader

KEYWORD = "plan"


@dataclass
class PlanSection:
    """The lines of a plan in a text, unread."""

    start: Reader
    rows: list[Reader] = field(default_factory=list)

    def read_into(
        self, program: Program, constants: Mapping[str, torch.Tensor] | None, quantizers: Mapping[str, Any]
    ) -> None:
        """Give a program the plan of these lines."""
        from quantc.store.plan_text import read_plan

        read_plan(program, self.start, self.rows, constants or {}, quantizers)


def plan_lines(program: Program) -> Iterator[str]:
    """The lines of a program's plan, the keyword first; none where nothing was decided."""
    if program.plan != Plan():
        from quantc.store.plan_text import write_plan

        if facts := [*write_plan(program)]:
            yield KEYWORD
            yield from facts


def plan_tensors(program: Program) -> dict[str, torch.Tensor]:
    """The tensors of a plan, by the names they have in the text."""
    if program.plan == Plan():
        return {}
    from quantc.store.plan_text import tensors_of

    return tensors_of(program)
