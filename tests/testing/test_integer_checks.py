"""The conformance kit holds rules that claim the integer form to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantc.annotate.quantizer import Backend
from quantc.integer import semantics
from quantc.integer.lowerings import lower_elementwise
from quantc.integer.match_lowering import NotIntegerError, Task
from quantc.integer.semantics import SEMANTICS, Semantics
from quantc.ir.types import TensorType, tensor_type
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.table import Rule
from quantc.spec.arithmetic import Arithmetic, Rounding
from quantc.targets.target import Target
from quantc.testing import Check, Conformance, Row, check_backend
from tests.support.faulty_backends import BOTH, GOOD, OWN
from tests.support.faulty_targets import Names, registered

aten_ops = torch.ops.aten
GOOD_IN_INTEGERS = replace(
    GOOD, table=replace(GOOD.table, rules=tuple(replace(rule, supports=BOTH) for rule in GOOD.table))
)


def with_rule(rule: Rule) -> Backend:
    """The good backend with one rule, and no other."""
    return replace(GOOD, table=replace(GOOD.table, rules=(rule,)))


def form_row(found: Conformance, rule: str) -> Row:
    row = found.row(rule, Check.INTEGER_FORM)
    assert row is not None
    return row


def test_rules_that_get_there_pass() -> None:
    found = check_backend(GOOD_IN_INTEGERS)
    assert found.failures == ()
    assert all(form_row(found, rule).models > 0 for rule in GOOD.table.names)


def test_rules_that_do_not_claim_it_are_not_asked() -> None:
    found = check_backend(with_rule(GOOD.table["tanh"]))
    assert "integer" not in GOOD.table["tanh"].supports
    assert found.row("tanh", Check.INTEGER_FORM) is None


# -- false claims ------------------------------------------------------------------------------------------------


def test_an_op_without_an_integer_form_is_said() -> None:
    row = form_row(check_backend(with_rule(Rule("wave", op("sin", args="x"), OWN, supports=BOTH))), "wave")
    assert not row.passed
    assert "sin stays in float: it has no integer form" in row.what
    assert "supports" in row.advice


def test_one_op_of_several_without_an_integer_form_is_said() -> None:
    pattern = op("sigmoid", "erf", args="x")
    row = form_row(check_backend(with_rule(Rule("curve", pattern, OWN, supports=BOTH))), "curve")
    assert not row.passed
    assert row.where == "erf"


def test_a_tail_that_stays_in_float_is_said() -> None:
    pattern = aten.add >> optional(op("sin", args="_"))
    roles = {"x": "act", "y": "act", "out": "act"}
    row = form_row(check_backend(with_rule(Rule("add", pattern, roles, supports=BOTH))), "add")
    assert not row.passed
    assert row.where == "add > sin"


# -- wrong semantics ---------------------------------------------------------------------------------------------


def swap(monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Task], None]) -> None:
    """Let an op be written otherwise."""
    semantics.load()
    monkeypatch.setitem(SEMANTICS, name, Semantics((name,), "wrong on purpose", write))


def sigmoid_row() -> Row:
    return form_row(check_backend(with_rule(replace(GOOD.table["sigmoid"], supports=BOTH))), "sigmoid")


def followed(monkeypatch: pytest.MonkeyPatch, *calls: tuple[Any, Any, torch.dtype]) -> None:
    """Let the integers of a sigmoid go through more ops: for each its target, second argument and dtype."""
    semantics.load()
    right = SEMANTICS["sigmoid"]

    def write(task: Task) -> None:
        (quantizer,) = task.quantizers()
        (reader,) = quantizer.users
        right.write(task)
        program, made, kind = task.program, reader.args[0], tensor_type(reader.all_input_nodes[0])
        assert kind is not None
        name = program.plan.lowered.rows.pop(reader.all_input_nodes[0])
        for target, argument, dtype in calls:
            made = program.emit(target, (made, argument), before=reader, value=TensorType(dtype, kind.shape))
        reader.args = (made, *reader.args[1:])
        program.plan.lowered[reader.all_input_nodes[0]] = name

    swap(monkeypatch, "sigmoid", write)


def test_a_result_two_steps_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    followed(monkeypatch, (aten_ops.add.Tensor, 2, torch.uint8))
    row = sigmoid_row()
    assert not row.passed
    assert "is 2 steps from Q/DQ" in row.what


def test_a_result_that_is_often_one_step_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    followed(monkeypatch, (aten_ops.bitwise_or.Scalar, 1, torch.uint8))
    row = sigmoid_row()
    assert not row.passed
    assert "elements that are not near a tie" in row.what


@pytest.mark.parametrize(("rounding", "saturate"), [("floor", True), ("truncate", True), ("half-up", False)])
def test_a_chip_that_rounds_otherwise_is_not_blamed_for_it(
    rounding: Rounding, saturate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ops are, where they compute something else."""
    add = Rule("add", aten.add, {"x": "act", "y": "act", "out": "act"}, supports=BOTH)
    backend = replace(with_rule(add), name="chip")
    arithmetic = Arithmetic(rounding=rounding, saturate=saturate)
    with registered(Target("chip", Names, arithmetic=arithmetic)):
        assert form_row(check_backend(backend), "add").passed
        right = SEMANTICS["sub"]
        swap(monkeypatch, "add", right.write)
        monkeypatch.setitem(lower_elementwise.SIGNS, "add", (1.0, 1.0625))
        row = form_row(check_backend(backend), "add")
    assert not row.passed
    assert "from Q/DQ" in row.what


def test_a_float_inside_the_integers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    to = aten_ops.to.dtype
    followed(monkeypatch, (to, torch.float32, torch.float32), (to, torch.uint8, torch.uint8))
    row = sigmoid_row()
    assert not row.passed
    assert "a float is left inside the integers" in row.what


def test_a_refusal_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: Task) -> None:
        raise NotIntegerError("it was not in the mood")

    swap(monkeypatch, "sigmoid", refuse)
    row = sigmoid_row()
    assert not row.passed
    assert "it was not in the mood" in row.what


def test_an_error_in_the_lowering_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: Task) -> None:
        raise ValueError("broken")

    swap(monkeypatch, "sigmoid", fail)
    row = sigmoid_row()
    assert not row.passed
    assert "broken" in row.what
