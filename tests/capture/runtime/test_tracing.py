"""Capture by observing a run: each call becomes ATen nodes, and what the graph does not show is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.capture.runtime.call_tracing import tensors_in
from quantc.capture.runtime.tracing import Recorder, SeenCall
from quantc.errors import CaptureError
from quantc.ir.sites import Origin

aten = torch.ops.aten


class Watched:
    """A model's run, call by call, as somebody sees it who intercepts them."""

    def __init__(self, model: nn.Module, *inputs: Any) -> None:
        self.recorder = Recorder(model)
        self.recorder.begin(inputs)

    def __call__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.seen(func, *args, **kwargs)[1]

    def seen(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[SeenCall, Any]:
        before = self.recorder.arrive(tensors_in((args, kwargs)))
        output = func(*args, **kwargs)
        return self.recorder.see(func, (args, kwargs), output, Origin("fc"), before), output

    def ops(self, *outputs: Tensor, is_straight: bool = False) -> list[str]:
        program = self.recorder.program("Net", outputs, is_straight=is_straight)
        return [str(node.target).removeprefix("aten.") for node in program.nodes() if node.op == "call_function"]


def test_a_run_becomes_a_program_that_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    run = Watched(model, x)
    with torch.no_grad():
        y = run(torch.relu, run(torch.nn.functional.linear, x, model.weight, model.bias))
        program = run.recorder.program("Net", [y])
        other = torch.randn(4, 3)
        assert torch.equal(program(other)[0], torch.relu(model(other)))
    assert run.recorder.reasons == []
    assert (program.method, program.name) == ("tracing", "Net")
    assert [str(node.target) for node in program.nodes() if node.op == "get_attr"] == ["weight", "bias"]


def test_a_call_that_is_made_again_is_one_node() -> None:
    x = torch.randn(3)
    run = Watched(nn.Module(), x)
    call, y = run.seen(torch.relu, x)
    run.recorder.again(call, ((x,), {}), torch.relu(x))
    assert (call.times, run.ops(y)) == (2, ["relu.default"])


def test_a_loop_reads_what_could_be_any_of_its_tensors() -> None:
    x = torch.randn(3)
    run = Watched(nn.Module(), x)
    call, y = run.seen(torch.tanh, x)
    z = torch.tanh(y)
    run.recorder.again(call, ((y,), {}), z)
    (read,) = call.reads
    assert read.name.startswith("merged_")
    program = run.recorder.program("Net", [z])
    assert [row.name for row in program.signature.inputs] == ["input_0", read.name]


def test_values_that_python_looks_at_are_results_too() -> None:
    x = torch.randn(3)
    run = Watched(nn.Module(), x)
    y = run(torch.relu, x)
    z = run(torch.neg, y)
    run.recorder.read([y], "the model looks at numbers")
    run.recorder.read([y], "the model looks at numbers")
    assert run.recorder.reasons == ["the model looks at numbers"]
    assert len(run.recorder.program("Net", [z])(x)) == 2


def test_tensors_from_elsewhere_are_inputs_and_a_reason() -> None:
    x, outside = torch.randn(3), torch.randn(3)
    run = Watched(nn.Module(), x)
    y = run(torch.add, x, outside)
    program = run.recorder.program("Net", [y])
    assert [row.name for row in program.signature.inputs] == ["input_0", "outside_1"]
    assert "outside" in run.recorder.reasons[0]
    assert torch.equal(program(x, outside)[0], x + outside)


def test_what_is_made_from_nothing_is_an_input_unless_the_program_is_straight() -> None:
    x = torch.ones(3)
    run = Watched(nn.Module(), x)
    y = run(torch.mul, x, run(torch.full, (3,), 2.0))
    assert run.ops(y) == ["mul.Tensor"]
    assert run.ops(y, is_straight=True) == ["full.default", "mul.Tensor"]


def test_writes_in_place_are_seen_with_the_tensors_that_they_change() -> None:
    x = torch.ones(3)
    run = Watched(nn.Module(), x)
    y = run(torch.neg, x)
    call, z = run.seen(torch.relu_, y)
    assert call.writes_first
    assert z is y
    program = run.recorder.program("Net", [y])
    assert torch.equal(program(torch.tensor([-1.0, 2.0, -3.0]))[0], torch.tensor([1.0, 0.0, 3.0]))
    writes_input, _ = run.seen(torch.relu_, x)
    assert writes_input.writes == (0,)
    assert any("writes to its input" in reason for reason in run.recorder.reasons)


def test_a_write_behind_torch_s_back_makes_a_value_unknown() -> None:
    x = torch.ones(3)
    run = Watched(nn.Module(), x)
    y = run(torch.neg, x)
    y.detach().numpy()[0] = 7.0
    run(torch.relu, y)
    assert any("written to" in reason for reason in run.recorder.reasons)


def test_parameters_that_change_while_the_model_runs_are_refused() -> None:
    model, x = nn.Linear(3, 3), torch.ones(1, 3)
    run = Watched(model, x)
    run(torch.nn.functional.linear, x, model.weight)
    assert run.recorder.written() == frozenset()
    with torch.no_grad():
        model.weight.add_(1)
    assert run.recorder.written() == {"weight"}
    with pytest.raises(CaptureError, match="weight"):
        run(torch.nn.functional.linear, x, model.weight)


def test_calls_without_a_form_in_aten_are_told_and_their_results_are_inputs() -> None:
    x = torch.tensor([1.0, 0.0, 2.0])
    run = Watched(nn.Module(), x)

    def sized(x: Tensor) -> Tensor:
        return x[x.bool().tolist().index(False) :] * 2

    run(sized, x)
    assert any("sized has no form in ATen" in reason for reason in run.recorder.reasons)


def test_the_parameters_that_a_node_is_computed_from_are_known() -> None:
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    run = Watched(model, x)
    call, _ = run.seen(torch.neg, model.weight)
    mixed, _ = run.seen(torch.nn.functional.linear, x, model.weight)
    made, computed = call.makes[0], mixed.makes[0]
    assert made is not None
    assert computed is not None
    assert run.recorder.sources(made) == ("weight",)
    assert run.recorder.sources(computed) == ()
    assert run.recorder.parameter(call.reads[0]) == "weight"
    assert run.recorder.parameter(made) == ""
    assert run.recorder.is_constant(model.weight)
    assert not run.recorder.is_constant(x)
