"""Recurrent layers as loops: what ATen's ops compute, with a body that is written once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.types import type_of, type_of_value
from quantc.passes.unroll_recurrent import CELLS, UnrollRecurrent
from quantc.pipeline.numeric_guard import GuardRecorder, isolated_run
from quantc.pipeline.pipeline import Pipeline
from tests.support.executorch_models import (
    NEAR,
    relative,
    without_data,
)

RECURRENT: dict[str, nn.Module] = {
    "lstm": nn.LSTM(6, 5, num_layers=2, batch_first=True),
    "bidirectional lstm": nn.LSTM(6, 5, bidirectional=True),
    "gru": nn.GRU(6, 5, num_layers=2, bidirectional=True, batch_first=True),
    "rnn": nn.RNN(6, 5, bias=False),
    "relu": nn.RNN(6, 5, nonlinearity="relu"),
}


def unrolled(program: Program) -> Program:
    return Pipeline((UnrollRecurrent(),)).run_on_copy(program, [Truth(), Verify(), Guard()])


def ops(program: Program) -> list[str]:
    return [op_name(node) for node in program.nodes() if node.op == "call_function"]


@pytest.mark.parametrize("name", RECURRENT)
def test_loops_compute_what_torchs_layers_do(name: str) -> None:
    layer: Any = RECURRENT[name].eval()
    x = torch.randn(3, 4, 6)
    program = qc.capture(layer, (x,), dynamic_shapes=None)
    own = unrolled(program)
    loops = layer.num_layers * (2 if layer.bidirectional else 1)
    assert ops(own).count("higher_order.scan") == loops
    assert ops(own).count("linear") == loops, "one product for all steps of each"
    assert not set(CELLS) & set(ops(own))
    with torch.no_grad():
        for got, want in zip(pytree.tree_leaves(own(x)), pytree.tree_leaves(layer(x)), strict=True):
            torch.testing.assert_close(got, want)
    assert own.log[-1].notes == ("1 written as loops",)
    assert not Pipeline((UnrollRecurrent(),)).run(own, [Truth()]).log[-1].changed


def test_any_number_of_sequences_and_steps() -> None:
    torch.manual_seed(0)
    model, sizes = Tagger().eval(), ({0: Dim("batch"), 1: Dim("steps")},)
    own = unrolled(qc.capture(model, (torch.randn(2, 3, 16),), dynamic_shapes=sizes))
    x = torch.randn(5, 7, 16)
    with torch.no_grad():
        torch.testing.assert_close(own(x), model(x))
    scan = next(node for node in own.graph.nodes if op_name(node) == "higher_order.scan")
    assert str(type_of(scan)) == "(f32[batch,16], f32[batch,16], f32[steps,batch,16])"


def test_types_are_those_of_what_runs() -> None:
    for name, layer in RECURRENT.items():
        x = torch.randn(3, 4, 6)
        own = unrolled(qc.capture(layer.eval(), (x,), dynamic_shapes=None))
        with isolated_run(own, 0):
            recorder = GuardRecorder(own)
            recorder.run(x, enable_io_processing=False)
        for node in own.graph.nodes:
            if node.op == "call_function":
                assert type_of_value(recorder.values[node.name]) == type_of(node), (name, node)


def test_each_op_says_which_layer_it_was_made_for() -> None:
    program = qc.capture(nn.LSTM(6, 5).eval(), (torch.randn(3, 4, 6),), dynamic_shapes=None)
    own = unrolled(program)
    before = {node.name for node in program.nodes()}
    made = [node for node in own.nodes() if node.op == "call_function" and node.name not in before]
    assert {own.plan.made_for.get(node) for node in made} == {"lstm"}


def test_layers_that_are_no_loops_stay() -> None:
    x = torch.randn(3, 4, 6)
    projecting = qc.capture(nn.LSTM(6, 5, proj_size=2).eval(), (x,), dynamic_shapes=None)
    training = qc.capture(nn.GRU(6, 5).train(), (x,), dynamic_shapes=None)
    for program, reason in ((projecting, "projects"), (training, "in training")):
        own = unrolled(program)
        assert str(own) == str(program)
        assert not own.log[-1].changed
        assert reason in own.log[-1].notes[0]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 16, bidirectional=True, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0])


@pytest.mark.slow
def test_a_recurrent_layer_is_a_loop_around_products_in_the_delegate() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 16)
    program = without_data(Tagger(), x, mode="dynamic")
    lowered = qc.lower(program, "executorch")
    assert relative(program(x), lowered(x)) < NEAR
    assert "scan" in lowered.delegation().others
    row = lowered.delegation().row("lstm")
    assert row is not None
    assert "its state is float" in row.why
    assert len(lowered.content) < 60_000, "as long as it would be for any number of steps"
