"""Modules kept whole: listed, computed as before, and traced around on both sides."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.ir.program import Program
from quantc.ir.types import TensorType, type_of
from tests.support.agree import assert_same, fingerprint, run


class Gate(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) if x.sum() > 0 else -self.fc(x)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x * 2, x * 3) if x.sum() > 0 else (x, -x)


class Named(nn.Module):
    def forward(self, x: Tensor, *, shift: Tensor | None = None, times: int = 1) -> Any:
        moved = x * times if shift is None else x * times + shift
        return {"value": moved, "nothing": None, "count": 7 if x.sum() > 0 else 8}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.gate = Gate()
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), Gate())
        self.pair = Pair()
        self.named = Named()

    def forward(self, x: Tensor) -> Any:
        y = self.gate(torch.relu(self.stem(x)))
        y = self.gate(y) + 1
        left, right = self.pair(self.body(y))
        out = self.named(left.view(left.size(0), -1), shift=right, times=2)
        return (out["value"].reshape(right.shape[0], 4) + out["count"]).softmax(-1)


X = torch.arange(12.0).reshape(3, 4) / 5 - 1
LEAVES: dict[str, Any] = {
    "by class": (Gate, Pair, Named),
    "by name": ("gate", "body.2", "pair", "named"),
    "mixed": ["gate", "body.2", Pair, Named],
    "nested": ("gate", "body", "pair", Named),
    "all the modules of a class that holds another": (nn.Sequential, Gate, Pair, Named),
}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def assert_agrees(program: Program, model: nn.Module, *inputs: Tensor) -> None:
    for x in inputs:
        assert_same(run(program, (x,)).output, run(model, (x,)).output)


def kept(program: Program) -> list[str]:
    return [str(node.target) for node in program.opaque() if node.op == "call_module"]


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_the_program_computes_the_same_either_way_the_data_goes(leaf: Any) -> None:
    model = net()
    before = fingerprint(model)
    program = qc.capture(model, (X,), leaf=leaf)
    assert program.method == "fx"
    assert fingerprint(model) == before
    program.verify()
    assert_agrees(program, model, X, -X, torch.zeros(3, 4))
    assert_agrees(program.clone(), model, X, -X)


def test_each_call_is_listed_and_the_code_around_is_canonical() -> None:
    program = qc.capture(net(), (X,), leaf=(Gate, Pair, Named))
    assert Counter(kept(program)) == Counter({"gate": 2, "body.2": 1, "pair": 1, "named": 1})
    assert kept(program) == [str(node.target) for node in program.opaque()], "nothing else is opaque"
    text = program.dump()
    assert text.count("linear(") == 2
    assert "relu(" in text
    assert "call_module @gate" in text
    origins = {program.origins[node].class_name for node in program.opaque()}
    assert origins == {"Gate", "Pair", "Named"}


def test_a_leaf_that_holds_leaves_is_one_node() -> None:
    program = qc.capture(net(), (X,), leaf=("body", Gate, Pair, Named))
    assert "body" in kept(program)
    assert "body.2" not in kept(program)


def test_shapes_are_known_behind_a_leaf() -> None:
    program = qc.capture(net(), (X,), leaf=(Gate, Pair, Named))
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not getattr:
            assert type_of(node) is not None, node.name
    assert type_of(program.node("softmax")) == TensorType(torch.float32, (3, 4))


def test_a_leaf_may_be_given_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Gate())
    assert kept(qc.capture(model, (X,), leaf=Gate)) == ["1"]
    assert kept(qc.capture(model, (X,), leaf="1")) == ["1"]


def test_a_leaf_of_the_models_own_class_leaves_the_model_open() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
    program = qc.capture(model, (X,), leaf=nn.Sequential)
    assert kept(program) == ["0"]
    assert "relu(" in program.dump()


def test_no_example_inputs() -> None:
    model = net()
    program = qc.capture(model, leaf=(Gate, Pair, Named))
    assert_agrees(program, model, X, -X, torch.randn(5, 4))


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cat([x, x])


def test_dynamic_sizes_pass_through_a_leaf_that_runs_on_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Doubles(), nn.ReLU())
    program = qc.capture(model, (X,), leaf=Doubles, dynamic_shapes=({0: Dim("n")},))
    assert "f32[2*n,4] = relu(" in program.dump()
    assert_agrees(program, model, X, torch.randn(7, 4))


def test_behind_a_leaf_that_depends_on_the_data_dynamic_sizes_are_unknown_but_right() -> None:
    model = net()
    program = qc.capture(model, (X,), leaf=(Gate, Pair, Named), dynamic_shapes={"x": {0: Dim("n")}})
    assert_agrees(program, model, X, -X, torch.randn(7, 4))


def test_parameters_of_a_leaf_stay_with_it_and_modes_reach_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    program = qc.capture(model.eval(), (X,), leaf="1")
    assert set(dict(program.module.named_parameters())) == set(dict(model.named_parameters()))
    program.train()
    torch.manual_seed(1)
    actual = program(X)
    torch.manual_seed(1)
    assert torch.equal(actual, model.train()(X))
    program.eval()
    assert torch.equal(program(X), model.eval()(X))


def test_weights_shared_with_a_leaf_stay_shared() -> None:
    gate, fc = Gate(), nn.Linear(4, 4)
    fc.weight = gate.fc.weight
    program = qc.capture(nn.Sequential(fc, gate), (X,), leaf=Gate)
    weights = [
        tensor for name, tensor in program.module.named_parameters(remove_duplicate=False) if name.endswith("weight")
    ]
    assert len(weights) == 2
    assert weights[0] is weights[1]


def add_one(_: nn.Module, args: Any, output: Any) -> Any:
    return output + 1


def test_hooks_of_a_leaf_run() -> None:
    gate = Gate()
    gate.register_forward_hook(add_one)
    model = nn.Sequential(nn.Linear(4, 4), gate)
    assert_agrees(qc.capture(model, (X,), leaf=Gate), model, X, -X)


def test_a_scripted_module_is_whole_without_being_asked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted: Any = torch.jit.script(Gate())
    model = nn.Sequential(nn.Linear(4, 4), scripted, nn.ReLU())
    program = qc.capture(model, (X,))
    assert kept(program) == ["1"]
    assert any("TorchScript" in note for entry in program.log for note in entry.notes), "the log says why it was fx"
    assert_agrees(program, model, X, -X)


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Any:
        if x.sum() > 100:
            return x
        x.add_(1)
        return x


def test_a_leaf_that_writes_does_not_reach_the_example_inputs() -> None:
    model = nn.Sequential(WritesInput(), nn.ReLU())
    example = X.clone()
    program = qc.capture(model, (example,), leaf=WritesInput)
    assert torch.equal(example, X)
    expected, actual = run(model, (X,)), run(program, (X,))
    assert_same(actual.output, expected.output)
    assert_same(actual.arguments, expected.arguments)
