"""Causes of refusals: their text for people, and their data for tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import fx

from quantc.ir.types import TensorType
from quantc.patterns.checks import at_most, equals, one_of
from quantc.patterns.operand_patterns import LeafKind
from quantc.patterns.refusals import (
    Cause,
    ComputedArgument,
    Condition,
    Fault,
    NotFree,
    Said,
    UsedElsewhere,
    WrongArguments,
    WrongOp,
    WrongOperand,
    WrongType,
    WrongValue,
)
from tests.support.pattern_graphs import Build


def star() -> tuple[fx.Node, fx.Node, fx.Node]:
    b = Build()
    relu = b("relu", b.input("x"))
    tanh, neg = b("tanh", relu), b("neg", relu)
    b.done(tanh, neg)
    return relu, tanh, neg


RELU, TANH, NEG = star()
NAMES = (
    *("Claimed", "ComputedArgument", "Condition", "NotFree", "Said", "UnknownType", "UsedElsewhere", "WrongArguments"),
    *("WrongOp", "WrongOperand", "WrongType", "WrongValue", "WrittenTo"),
)
FAULTS = (Fault("groups", 2, equals(1)), Fault("padding", [1, 1], at_most(0)))


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (Said("because"), "because"),
        (WrongArguments(RELU, FAULTS), "relu has groups = 2, wanted groups == 1"),
        (ComputedArgument(RELU, "dim", one_of(1, 2)), "dim of relu is computed, wanted dim in (1, 2)"),
        (UsedElsewhere(RELU, NEG), "relu has 2 users; neg uses it too"),
        (NotFree(RELU, "a mask"), "relu is a mask"),
        (Condition("same-shape", "x is smaller"), "x is smaller"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_causes_read_as_reasons(cause: Cause, text: str) -> None:
    assert str(cause) == text


@pytest.mark.parametrize(
    ("cause", "data"),
    [
        (Said("because"), {"kind": "other", "text": "because"}),
        (
            WrongOp(TANH, ("relu", "clamp"), "expected relu"),
            {"kind": "wrong-op", "found": "tanh", "ops": ["relu", "clamp"], "text": "expected relu"},
        ),
        (
            WrongOperand(None, LeafKind.CONST, "w", "expected w"),
            {"kind": "wrong-operand", "found": None, "wanted": "const", "name": "w", "text": "expected w"},
        ),
        (
            WrongValue(torch.int8, [1, True, 0.5], "expected it"),
            {"kind": "wrong-value", "found": "i8", "wanted": [1, True, 0.5], "text": "expected it"},
        ),
        (
            WrongType(RELU, TensorType(torch.float32, (2, 3)), (), (4,), "wanted rank 4"),
            {
                "kind": "wrong-type",
                "value": "relu",
                "found": "f32[2,3]",
                "dtypes": [],
                "ranks": [4],
                "text": "wanted rank 4",
            },
        ),
        (
            WrongArguments(RELU, FAULTS),
            {
                "kind": "wrong-arguments",
                "node": "relu",
                "faults": [
                    {"argument": "groups", "found": 2, "wanted": "== 1"},
                    {"argument": "padding", "found": [1, 1], "wanted": "<= 0"},
                ],
            },
        ),
        (UsedElsewhere(RELU, NEG), {"kind": "used-elsewhere", "node": "relu", "other": "neg"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_causes_are_data_that_goes_to_json(cause: Cause, data: dict[str, Any]) -> None:
    assert cause.to_data() == data
    assert json.loads(json.dumps(cause.to_data())) == data


def test_every_kind_of_cause_has_a_name_of_its_own() -> None:
    kinds = {kind.__name__: kind.kind for kind in Cause.__subclasses__()}
    assert {*NAMES} <= {*kinds}
    assert len(set(kinds.values())) == len(kinds)
