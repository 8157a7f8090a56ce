"""Lines that are no facts of a plan are refused where they stand."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import ParseError
from quantc.ir.program import Program
from quantc.text.digests import constants

X = torch.linspace(-2, 3, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.fixture(scope="module")
def calibrated() -> Program:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    program = qc.prepare(qc.capture(model.eval(), (X,)), "x86", config=qc.QuantConfig().set("3", qc.FLOAT, role="bias"))
    qc.calibrate(program, [X], progress="silent")
    return program


WRONG: dict[str, tuple[str, str, str, int]] = {
    "unknown line": ('  claim "conv2d"', '  claims "conv2d"', "'claims' does not begin a line of a plan", 3),
    "unknown node": ('claim "conv2d"', 'claim "conv2"', "unknown node 'conv2'", 9),
    "twice": ('claim "relu"', 'claim "conv2d"', "claims of 'conv2d' are given twice", 9),
    "part": ('root="relu"}', 'root="relu", part="half"}', "claims.conv2d.part", 9),
    "no root": (', root="relu"}', "}", "claims.conv2d.root", 9),
    "unknown spec": ('quantize("uint8', 'quantize("uint9', "uint9", 26),
    "unknown outcome": ('in0" = quantize(', 'in0" = quantise(', "unknown outcome 'quantise'", 26),
    "not a site": ('outcome "conv2d:in0"', 'outcome "conv2d"', "'conv2d' is not a site", 3),
    "unknown source": ('source="data"', 'source="hope"', "groups.0.source", 9),
    "foreign source": ('source="data"', 'source="given"', "do not come from 'given'", 9),
    "no places": ('places=["conv2d:in0"]', "places=[]", "at least one place", 9),
    "a config of nothing": ('config = {"rules"', 'config = {"rule"', "config", 3),
    "unknown instruction set": ('= "avx2"', '= "avx3"', "unknown instruction set 'avx3'", 19),
    "a number for text": ('claim "conv2d" = "conv"', 'claim "conv2d" = 7', "expected a string", 20),
    "not JSON": ("batches = 1", "batches = f32", "a plan holds text, numbers", 13),
    "negative": ("batches = 1", "batches = -1", "batches", 1),
    "digest": (" #", " #z", "is not a digest", 0),
    "scale": ("low : f32[] = ", "low : f32[] = nan, was : f32[] = ", "low", 0),
    "tensor of several": ("high : f32[] =", "high : f32[2] =", "only one number is written as it is", 0),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_that_is_none_is_an_error_at_its_place(case: str, calibrated: Program) -> None:
    old, new, match, column = WRONG[case]
    head, keyword, section = str(calibrated).partition("\nplan\n")
    assert old in section
    with pytest.raises(ParseError, match=re.escape(match)) as caught:
        qc.parse(head + keyword + section.replace(old, new, 1), constants(calibrated))
    assert caught.value.line is not None
    line = (head + keyword).count("\n") + section[: section.index(old)].count("\n") + 1
    assert caught.value.line == line
    assert not column or caught.value.column == column


def test_nothing_follows_a_plan_but_its_lines(calibrated: Program) -> None:
    text = str(calibrated)
    for more in ("graph @again\n", "plan\n", "  output ()\n"):
        with pytest.raises(ParseError, match="does not begin a line of a plan"):
            qc.parse(text + more)
    with pytest.raises(ParseError, match="expected the end of the line"):
        qc.parse(text.replace("\nplan\n", "\nplan x86\n"))
    assert qc.parse(text.replace("\nplan\n", "\nplan  # what was decided\n\n  # a comment\n")).plan.groups
