"""Joins on integers: tensors on different grids are brought to that of the result, each rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import UINT8
from tests.support.moves import (
    SCALE,
    Function,
    captured,
    computes_on_integers,
    fixed,
    images,
    integer_form,
    levels,
    real,
    rescaled,
)

GRIDS = {
    "first": fixed(UINT8, 77),
    "second": fixed(UINT8, 3, float(np.float32(0.021))),
    "third": fixed(UINT8, 120, float(np.float32(0.05))),
}


def joining(join: dict[str, str]) -> Backend:
    """`flip` gives tensors on one grid, `roll` on another; what joins them is up to the test."""
    rules = (
        Rule("flip", op("flip", args="x"), {"x": "first", "out": "first"}),
        Rule("roll", op("roll", args="x"), {"x": "second", "out": "second"}),
        Rule("join", op("cat", "stack", args="xs*"), join),
    )
    return Backend("joining", RuleTable("joining", rules), roles=GRIDS)


@pytest.mark.parametrize("fixed_form", [False, True])
@pytest.mark.parametrize("out", ["first", "second", "third"])
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_tensors_on_different_grids_are_rescaled_where_they_must_be(join: Function, out: str, fixed_form: bool) -> None:
    x, y = images(1), images(2)
    program = captured(lambda x, y: join([x.flip(1), y.roll(2, 3), x.flip(1)], 1), x, y)
    prepared = qc.prepare(program, joining({"xs": "pass", "out": out}))
    integer = qc.convert(prepared, to="integer", multiplier="fixed" if fixed_form else "float64")
    to = GRIDS[out]
    left = np.flip(levels(x, UINT8, 77), 1)
    right = np.roll(levels(y, UINT8, 3, GRIDS["second"].scale), 2, 3)
    left, right = rescaled(left, SCALE, to), rescaled(right, GRIDS["second"].scale, to)
    wanted = (np.concatenate if join is torch.cat else np.stack)([left, right, left], 1)
    np.testing.assert_array_equal(integer(x, y).numpy(), real(wanted, to.scale))
    assert computes_on_integers(integer, [x, y])
    rescalings = [node for node in integer.graph.nodes if str(node.target) == "quantc.requantize.default"]
    assert len(rescalings) == {"first": 1, "second": 2, "third": 3}[out]
    assert [row.op for row in integer.coverage().rows] == ["flip", "roll", "flip", join.__name__]


def test_a_join_of_one_grid_that_is_read_in_float_is_dequantized_after_it() -> None:
    x = images()
    program = captured(lambda x: torch.cat([x.flip(1), x.flip(2)], 1).exp(), x)
    integer = integer_form(program, joining({"xs": "pass"}))
    centered = levels(x, UINT8, 77)
    joined = real(np.concatenate([np.flip(centered, 1), np.flip(centered, 2)], 1))
    torch.testing.assert_close(integer(x), torch.from_numpy(joined).exp(), rtol=0, atol=0)
    assert [row.op for row in integer.coverage().rows_for("quantized")] == ["flip", "flip", "cat"]


@pytest.mark.parametrize("other", [lambda y: y.roll(2, 3), lambda y: y])
def test_a_join_in_float_of_different_grids_or_with_a_float_stays_float(other: Function) -> None:
    x, y = images(1), images(2)
    program = captured(lambda x, y: torch.cat([x.flip(1), other(y)], 1), x, y)
    prepared = qc.prepare(program, joining({"xs": "pass"}))
    integer, qdq = qc.convert(prepared, to="integer"), qc.convert(prepared)
    assert [row.op for row in integer.coverage().rows_for("float")] == ["cat"]
    torch.testing.assert_close(integer(x, y), qdq(x, y), rtol=0, atol=0)
