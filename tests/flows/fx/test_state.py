"""The state of a quantized model beside its tensors: the numbers that stand in its graph."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import LoadError
from quantc.flows.fx import convert_fx, get_default_qconfig_mapping, prepare_fx
from quantc.flows.fx.state import Grid, numbers_of, put_numbers
from quantc.ir.program import Program


@cache
def _converted(scale: float, model: nn.Module, shape: tuple[int, ...]) -> Program:
    torch.manual_seed(0)
    x = scale * torch.randn(shape)
    prepared = prepare_fx(model.eval(), get_default_qconfig_mapping(), (x,))
    prepared(x)
    return convert_fx(prepared).program


PLAIN = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))


def converted(scale: float, model: nn.Module = PLAIN, shape: tuple[int, ...] = (8, 4)) -> Program:
    """A program whose numbers come from data of some size."""
    return _converted(scale, model, shape).clone()


def scales(program: Program) -> list[Any]:
    return [node.args[1] for node in program.nodes() if "quantize_per_tensor" in str(node.target)]


def test_the_numbers_of_one_program_make_the_other_the_same() -> None:
    small, large = converted(1.0), converted(30.0)
    assert scales(small) != scales(large)
    outputs: dict[int, Grid] = {1: (0.5, 3, torch.quint8)}
    assert put_numbers(small, numbers_of(large, outputs)) == outputs
    assert scales(small) == scales(large)
    assert torch.equal(numbers_of(small, {}), numbers_of(large, {}))


def test_the_state_is_bytes_of_text() -> None:
    program = converted(1.0)
    state = numbers_of(program, {})
    assert state.dtype is torch.uint8
    read = json.loads(bytes(state.tolist()))
    assert [row[0] for row in read["calls"]] == [node.name for node in program.nodes()]
    assert read["outputs"] == []


def test_another_model_is_refused() -> None:
    state = numbers_of(converted(1.0), {})
    with pytest.raises(LoadError, match="calls"):
        put_numbers(converted(1.0, nn.Sequential(nn.Linear(4, 4))), state)
    with pytest.raises(LoadError, match="unflatten"):
        put_numbers(converted(1.0, nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (4, 1)))), state)


@pytest.mark.parametrize(
    ("one", "other", "shape"),
    [
        (nn.Softmax(1), nn.Softmax(0), (4, 4)),
        (nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, stride=2), (2, 4, 9)),
    ],
    ids=["axis", "stride"],
)
def test_sizes_and_axes_belong_to_the_model(one: nn.Module, other: nn.Module, shape: tuple[int, ...]) -> None:
    """Programs of the same calls that differ in a size or an axis are two models."""
    state = numbers_of(converted(1.0, nn.Sequential(one), shape), {})
    with pytest.raises(LoadError, match="another model"):
        put_numbers(converted(1.0, nn.Sequential(other), shape), state)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"calls": []}', b"3"], ids=["nothing", "half", "list", "no outputs", "number"]
)
def test_what_cannot_be_read_is_refused(text: bytes) -> None:
    state = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(LoadError, match="_extra_state"):
        put_numbers(converted(1.0), state)
