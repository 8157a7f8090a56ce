"""Streams take in tensors, and refuse what contradicts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantc.recover.coordinates import Coordinates
from quantc.recover.example_run import ExampleRun
from quantc.recover.stream import CannotRotateError, Stream, is_move
from tests.support.streams import captured


def stream() -> Stream:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.ReLU()).eval()
    program = captured(model, torch.randn(2, 4))
    run = ExampleRun.of(program)
    assert isinstance(run, ExampleRun)
    return Stream(program, run)


def test_moves_come_first_and_constants_are_ends() -> None:
    found = stream()
    linear, flatten, _ = (node for node in found.program.graph.nodes if node.op == "call_function")
    found.join(linear, Coordinates.along(2, 1, 4, 4), linear)
    assert [node.name for node in found.pending()] == [flatten.name, linear.name]
    assert is_move(flatten)
    assert not is_move(linear)
    found.join(linear.args[1], Coordinates.along(2, 0, 4, 4), linear, "w")
    assert [(use.role, use.axis) for use in found.constants] == [("w", 0)]


def test_an_input_and_another_arrangement_are_refused() -> None:
    found = stream()
    linear = next(node for node in found.program.graph.nodes if node.op == "call_function")
    with pytest.raises(CannotRotateError, match="is an input"):
        found.join(linear.args[0], Coordinates.along(2, 1, 4, 4), linear)
    found.join(linear, Coordinates.along(2, 1, 4, 4), linear)
    with pytest.raises(CannotRotateError, match="arranged in another way"):
        found.join(linear, Coordinates(torch.tensor([[1, 0, 3, 2]]), 4), linear)


def test_an_operand_is_uniform_if_it_has_one_element_for_each_vector() -> None:
    found = stream()
    linear = next(node for node in found.program.graph.nodes if node.op == "call_function")
    along = Coordinates.along(2, 1, 4, 4)
    assert found.uniform(2.0, along)
    assert not found.uniform(linear, along)
    bias = linear.args[2]
    assert not found.uniform(bias, along)
    tensor = found.constant(bias)
    assert tensor is not None
    with torch.no_grad():
        tensor.fill_(3.0)
    assert found.uniform(bias, along)
