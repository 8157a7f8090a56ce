"""The example programs of the kit: at every stage, and never changed by those who check on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantc.ir.program import Stage
from quantc.testing.example_programs import float_programs, modules, programs_at


def test_there_is_a_program_at_every_stage() -> None:
    found = list(programs_at(Stage.CAPTURED, None))
    expected = {Stage.CANONICAL, Stage.FUSED, Stage.SHARED, Stage.CALIBRATED, Stage.FOLDED, Stage.LOWERED}
    assert {program.stage for _, program in found} == expected
    assert len(found) == len(expected) * len(modules())
    for _, program in found:
        program.verify()
        program.run_flat(program.example_inputs or ())


@pytest.mark.parametrize(("needs", "before"), [(Stage.FUSED, Stage.CALIBRATED), (Stage.FOLDED, None)])
def test_stages_are_those_asked_for(needs: Stage, before: Stage | None) -> None:
    for label, program in programs_at(needs, before):
        assert needs <= program.stage < (before or Stage.LOWERED + 1)
        assert label.endswith(program.stage.label)


def test_every_program_is_a_copy() -> None:
    first, second = (next(programs_at(Stage.CAPTURED, None))[1] for _ in range(2))
    first.name = "changed"
    next(iter(first.root.parameters())).data.zero_()
    assert second.dump() != first.dump()
    assert next(programs_at(Stage.CAPTURED, None))[1].dump() == second.dump()


def test_given_ones_come_after_the_examples() -> None:
    given = {"mine": lambda: (nn.Linear(2, 2), (torch.ones(1, 2),))}
    assert [name for name, _ in float_programs(given)] == [*modules(), "mine"]
    assert {label for label, _ in programs_at(Stage.LOWERED, None, given)} >= {"mine, lowered"}
