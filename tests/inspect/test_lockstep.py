"""Two programs run side by side: which nodes are twins, what each adds of noise, and what becomes zero."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError, QuantcError
from quantc.inspect.lockstep import Lane, Lockstep, is_compared, is_integer, twins
from quantc.ir.program import Program, Stage
from quantc.qdq.registration import decomposed_ops
from tests.support.by_hand import Builder, two_layers

aten = torch.ops.aten
GRID = (0.5, 4, 0, 8, torch.uint8)
"""Steps of a half, from -2 to 2."""


def float_program(example: Tensor) -> Program:
    build = Builder()
    return build.program(build.call(aten.mul.Tensor, build.call(aten.neg.default, build.input("x", example)), 3.0))


def rounded_program(example: Tensor) -> Program:
    """The same with what the product reads rounded to a grid."""
    build, ops = Builder(), decomposed_ops()
    neg = build.call(aten.neg.default, build.input("x", example))
    levels = build.call(ops.quantize_per_tensor.default, neg, *GRID)
    back = build.call(ops.dequantize_per_tensor.default, levels, *GRID)
    return build.program(build.call(aten.mul.Tensor, back, 3.0), stage=Stage.QUANTIZED)


X = torch.tensor([0.125, -1.0, 0.75, 0.0, 9.0])
"""Of which the first becomes zero, the third goes to the even level, 1, and the last to the end of the grid, 2."""


def locked(*batches: Tensor) -> Lockstep:
    found = Lockstep(float_program(X), rounded_program(X))
    for batch in batches:
        found.run([batch], [batch])
    return found


def test_nodes_of_both_programs_are_found_through_the_ops_between() -> None:
    found, apart = twins(float_program(X), rounded_program(X))
    assert {node.name: twin.name for node, twin in found.items()} == {"x": "x", "neg": "neg", "mul": "mul"}
    assert apart == []


def test_a_node_of_another_op_shape_or_operand_has_no_twin() -> None:
    changed = two_layers()
    changed.node("relu").target = aten.tanh.default
    _, apart = twins(changed, two_layers())
    assert [node.name for node in apart] == ["relu"]
    moved = two_layers()
    moved.node("tanh").args = (moved.node("linear"),)
    _, apart = twins(moved, two_layers())
    assert [node.name for node in apart] == ["tanh"]
    _, apart = twins(float_program(X.double()), float_program(X))
    assert [node.name for node in apart] == ["x", "neg", "mul"]


def test_noise_is_counted_where_it_arises() -> None:
    found = locked(X)
    assert found.cumulative["neg"].sqnr == math.inf
    wanted = -3.0 * X
    made = 3.0 * torch.tensor([0.0, 1.0, -1.0, 0.0, -2.0])
    decibels = 10 * math.log10(float(wanted.square().sum() / (wanted - made).square().sum()))
    for noise in (found.cumulative["mul"], found.local["mul"], found.outputs[0]):
        assert noise.sqnr == pytest.approx(decibels, abs=1e-4)
    assert found.largest == pytest.approx([21.0])
    assert found.local.keys() == {"mul"}


def test_an_op_behind_a_noisy_one_has_little_of_its_own() -> None:
    """The second product reads 9 where the grid ends at 2; given the float value's level it is off no more than the first."""
    ops = decomposed_ops()

    def program(rounds: bool) -> Program:
        build = Builder()
        value = build.input("x", X)
        for _ in range(2):
            read = value
            if rounds:
                levels = build.call(ops.quantize_per_tensor.default, value, *GRID)
                read = build.call(ops.dequantize_per_tensor.default, levels, *GRID)
            value = build.call(aten.mul.Tensor, read, 0.25)
        return build.program(value, stage=Stage.QUANTIZED if rounds else Stage.CANONICAL)

    found = Lockstep(program(False), program(True))
    found.run([X], [X])
    assert found.local["mul_1"].sqnr > found.cumulative["mul_1"].sqnr
    assert found.local["mul"].sqnr == found.cumulative["mul"].sqnr


def test_values_that_become_zero_are_counted_over_all_batches() -> None:
    assert locked(X).vanished == {"neg": (1, 4)}
    assert locked(X, X * 0, torch.full_like(X, 0.1)).vanished == {"neg": (6, 9)}


def test_ops_are_not_run_twice_where_that_does_harm() -> None:
    build = Builder()
    x = build.input("x", X)
    writes = build.program(build.call(aten.add_.Tensor, build.call(aten.neg.default, x), 1.0))
    assert not Lockstep(writes, writes).can_repeat
    assert locked().can_repeat


def test_a_batch_that_does_not_run_names_the_op() -> None:
    lane = Lane(two_layers())
    lane.start([torch.zeros(2, 5)])
    *before, linear = lane.order[: 1 + lane.order.index(lane.program.node("linear"))]
    for node in before:
        lane.step(node)
    with pytest.raises(InputError, match="does not run on this batch") as caught:
        lane.step(linear)
    assert "linear" in str(caught.value.where)


def test_values_are_dropped_after_their_last_use() -> None:
    program = two_layers()
    lane = Lane(program)
    lane.start([torch.zeros(2, 4)])
    for node in lane.order:
        lane.step(node)
        lane.drop(node)
        assert sum(key.op == "call_function" for key in lane.env) <= 1


def test_outputs_of_another_kind_are_refused() -> None:
    other = Builder()
    x = other.input("x", X)
    neg = other.call(aten.neg.default, x)
    with pytest.raises(QuantcError, match="1 and 2 outputs"):
        Lockstep(float_program(X), other.program(neg, neg)).run([X], [X])


def test_items_and_inputs_have_no_row() -> None:
    build = Builder()
    parts = build.call(aten.split.Tensor, build.input("x", X), 3)
    program = build.program(build.call(torch.ops.aten.neg.default, build.call(operator.getitem, parts, 0)))
    assert [node.name for node in program.graph.nodes if is_compared(node)] == ["split", "neg"]


def test_the_integer_form_is_known_by_its_stage() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    prepared = qc.prepare(qc.capture(nn.Linear(4, 3).eval(), (x,)), "x86")
    qc.calibrate(prepared, [x])
    assert [is_integer(qc.convert(prepared, to=to)) for to in ("qdq", "integer")] == [False, True]
