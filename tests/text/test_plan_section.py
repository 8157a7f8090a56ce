"""The `plan` section of a text: where it stands, and what it is left out of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import ParseError
from quantc.ir.program import Program
from quantc.text.plan_section import KEYWORD, plan_lines, plan_tensors


@pytest.fixture(scope="module")
def captured() -> Program:
    return qc.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.ones(1, 4),))


@pytest.fixture(scope="module")
def prepared(captured: Program) -> Program:
    return qc.prepare(captured, "x86")


def test_programs_without_decisions_have_no_section(captured: Program) -> None:
    assert list(plan_lines(captured)) == []
    assert plan_tensors(captured) == {}
    assert str(captured) == captured.dump(plan=False)


def test_the_section_follows_the_graphs_and_ends_the_text(prepared: Program) -> None:
    first, *facts = plan_lines(prepared)
    assert first == KEYWORD
    assert facts
    graphs = prepared.dump(plan=False)
    assert str(prepared).startswith(graphs.rstrip("\n"))
    assert str(prepared)[len(graphs.rstrip("\n")) :].split() == " ".join([KEYWORD, *facts]).split()


def test_a_plan_is_read_where_its_section_begins(prepared: Program) -> None:
    assert list(plan_lines(qc.parse(str(prepared)))) == list(plan_lines(prepared))
    assert list(plan_lines(qc.parse(prepared.dump(plan=False)))) == []
    with pytest.raises(ParseError, match="line"):
        qc.parse(f"{prepared}\nno fact of a plan")
