"""The table of ONNX writers, and what they are given: an op's arguments, types, axes, sizes and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quantc.ir.dialect import BY_NAME
from quantc.targets.onnx import op_writers
from quantc.targets.onnx.graph_builder import GraphBuilder
from quantc.targets.onnx.op_writers import NoOnnxFormError, OpCall, Translation, entries, entry_for, writes
from quantc.targets.onnx.profiles import PROFILES
from tests.support.onnx_ops import Function, check_function, drawn, program_of


def test_the_table_knows_nearly_all_of_the_dialect() -> None:
    missing = set(BY_NAME) - set(entries())
    assert missing == {"alpha_dropout", "embedding_bag", "feature_alpha_dropout", "feature_dropout"}


def call_of(function: Callable[..., Any], *inputs: Tensor, is_open: bool = False) -> OpCall:
    """The last op of a function, its inputs named as they are in the program."""
    program = program_of(Function(function), *inputs, is_open=is_open)
    translation = Translation(program, GraphBuilder(), PROFILES["onnxruntime"])
    translation.values.update({node: node.name for node in program.graph.nodes if node.op != "get_attr"})
    *_, last = (node for node in program.graph.nodes if node.op == "call_function")
    return OpCall(translation, last)


def test_an_op_without_an_entry_is_refused_by_name() -> None:
    with pytest.raises(NoOnnxFormError, match=r"aten\.digamma\.default"):
        entry_for(call_of(torch.digamma, drawn(3)).node)


def test_entries_are_found_by_the_names_they_are_registered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_writers, "ENTRIES", dict(entries()))

    @writes("aten.digamma.default", "aten.lgamma.default")
    def written(call: OpCall) -> str:
        return call.emit("Abs", call.read(call.node.args[0]))

    for function in (torch.digamma, torch.lgamma):
        assert entry_for(call_of(function, drawn(3)).node) is written


def test_axes_count_from_the_front() -> None:
    call = call_of(lambda x: x.mean((0, -1)), drawn(2, 3, 4))
    assert call.rank() == 3
    assert [call.axis(axis) for axis in (0, 2, -1, -3)] == [0, 2, 2, 0]
    assert call.axes((-1, 0)) == [2, 0]
    assert call.axes(-2) == [1]
    assert call.axes_or_all(None) == call.axes_or_all([]) == [0, 1, 2]
    assert call.axis(-1, 5) == 4
    assert call.axis(0, 0) == 0


def test_arguments_have_their_defaults_and_types() -> None:
    call = call_of(lambda x: x.softmax(1), drawn(2, 3))
    assert (call["dim"], call["dtype"]) == (1, None)
    assert (call.result.dtype, call.result.shape) == (torch.float32, (2, 3))
    with pytest.raises(NoOnnxFormError, match="unknown"):
        call.type(None)


def test_values_are_cast_only_to_another_type() -> None:
    call = call_of(torch.relu, drawn(3))
    x = call.node.args[0]
    assert call.read(x) == call.read(x, torch.float32) == "x"
    assert call.writer.nodes == []
    call.read(x, torch.int64)
    assert [node.op_type for node in call.writer.nodes] == ["Cast"]
    call.read(2.5)
    call.read(True, torch.bool)
    assert [(tensor.data_type, list(tensor.dims)) for tensor in call.writer.initializers] == [(1, []), (9, [])]


def test_sizes_are_constant_where_they_can_be() -> None:
    call = call_of(lambda x: x.reshape(x.shape[0], 6), drawn(4, 2, 3), is_open=True)
    x = call.node.args[0]
    assert isinstance(x, fx.Node)
    assert call.fixed() == (2, 3)
    call.sizes([2, 3])
    call.shape_of(x)
    call.size("x", 1)
    (node, other) = call.writer.nodes
    assert (node.op_type, other.op_type) == ("Shape", "Shape")
    assert {each.name: each.i for each in other.attribute} == {"start": 1, "end": 2}
    assert len(call.writer.initializers) == 1
    varying = next(node for node in call.translation.program.graph.nodes if "sym_size" in str(node.target))
    call.sizes([varying, 6])
    assert call.writer.nodes[-1].op_type == "Concat"
    assert call.number(varying) == varying.name


def test_sizes_that_vary_are_refused_where_they_must_not() -> None:
    call = call_of(lambda x: x.transpose(0, 1).relu(), drawn(4, 2, 3), is_open=True)
    with pytest.raises(NoOnnxFormError, match="vary"):
        call.fixed()


def test_a_constant_is_written_at_its_first_use_and_once() -> None:
    weight = drawn(3, seed=1)
    call = call_of(lambda x: x + weight, drawn(3))
    constant = call.node.args[1]
    assert isinstance(constant, fx.Node)
    assert call.translation.value(constant) == call.translation.value(constant)
    assert len(call.writer.initializers) == 1
    call.translation.values[constant] = ("a", "b")
    with pytest.raises(NoOnnxFormError, match="several tensors"):
        call.translation.value(constant)


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(0) + x.log_softmax(-1),
    "reductions": lambda x: x.sum(0) + x.mean(-1) + x.amax(0) + x.prod(0) + x.logsumexp(0) + x.cumsum(0),
    "places": lambda x: (*x.max(0), *x.topk(1), *x.sort(), x.argmax(0)),
    "any": lambda x: (x > 0).any(0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_ops_along_an_axis_take_a_number_for_a_vector_of_one(name: str) -> None:
    check_function(NUMBERS[name], torch.tensor(1.5))
