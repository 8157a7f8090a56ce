"""Observers in a graph: read into the plan, continued from it, and removed without a trace."""

from __future__ import annotations

import pytest
import torch

import quantc as qc
from quantc.calibration.graph_observers import HOLDER, read_observers, redirect, remove_observers, show_observers
from quantc.ir.dialect import is_op
from quantc.ir.program import Program, Stage
from quantc.observe import MinMax, observers_in
from tests.support.calibration import batch, data, prepared
from tests.support.observations import bits_of


@pytest.fixture
def observed() -> Program:
    return qc.Pipeline.parse("insert-observers").run(prepared("minmax").clone())


def test_what_observers_have_seen_goes_into_the_plan(observed: Program) -> None:
    told = [(read_observers(observed), observed.stage)]
    for x in data(2):
        observed(x)
    told.append((read_observers(observed), observed.stage))
    assert told == [(False, Stage.OBSERVED), (True, Stage.CALIBRATED)]
    plain = prepared("minmax")
    qc.calibrate(plain, data(2))
    assert observed.plan.statistics.keys() == plain.plan.statistics.keys()
    for name, seen in plain.plan.statistics.items():
        assert bits_of(observed.plan.statistics[name]) == bits_of(seen), name


def test_observers_go_on_from_the_plan_with_copies(observed: Program) -> None:
    plain = prepared("minmax")
    qc.calibrate(plain, data(1))
    observed.plan.statistics.update(plain.plan.statistics)
    show_observers(observed)
    observed(batch(1) * 100)
    after = {observer.group: observer.observation for observer in observers_in(observed.root)}
    for name, seen in plain.plan.statistics.items():
        assert isinstance(seen, MinMax)
        assert after[name].seen == 2 * seen.seen
        assert observed.plan.statistics[name] is seen


def test_observers_of_one_group_share_what_they_go_on_from(observed: Program) -> None:
    first, second, *_ = observers_in(observed.root)
    second.group = first.group
    observed.plan.statistics[first.group] = MinMax()
    show_observers(observed)
    assert first.observation is second.observation
    assert first.observation is not observed.plan.statistics[first.group]


def test_removing_them_leaves_the_program_that_was_observed(observed: Program) -> None:
    before = [(node.op, node.name, str(node.args)) for node in prepared("minmax").nodes()]
    assert remove_observers(observed) == 6
    assert [(node.op, node.name, str(node.args)) for node in observed.nodes()] == before
    assert HOLDER not in observed.root._modules
    assert remove_observers(observed) == 0
    assert torch.equal(observed(batch(0)), prepared("minmax")(batch(0)))


def test_a_reader_of_one_tensor_twice_is_rewired_at_both_places() -> None:
    program = prepared("minmax").clone()
    add = next(node for node in program.nodes() if is_op(node, "add"))
    relu = next(node for node in program.nodes() if is_op(node, "relu"))
    conv = add.args[0]
    assert isinstance(conv, torch.fx.Node)
    redirect(program, {conv: relu}, [add])
    assert list(add.args[:2]) == [relu, relu]
    redirect(program, {relu: conv}, [add])
    assert list(add.args[:2]) == [conv, conv]
    assert add not in relu.users
