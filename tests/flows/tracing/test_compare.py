"""Leaves of the tracing flow, and its numeric suite: a prepared model beside the converted one, call by call."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.errors import CaptureError, DataError, InputError
from quantc.flows.tracing import UnseenOpError, compare, convert, coverage, prepare
from tests.support.traced_runs import decibels


class Gate(nn.Module):
    """Calls its layer as often as it likes, writes to what it is given past torch's count, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        y = x
        for _ in range(x.shape[0] % 3):
            y = F.relu(self.fc(y))
        x.data.add_(1.0)
        return y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 8), Gate(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.gate(y)
        made: Tensor = self.last(z) + self.last(y)  # y is what the gate has left
        return made


def gated() -> tuple[Gated, list[Tensor]]:
    torch.manual_seed(0)
    return Gated().eval(), [torch.randn(rows, 8) for rows in (6, 4, 5, 6, 4, 5)]


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("leaf", ["gate", Gate, ["gate"], (Gate,)], ids=str)
@torch.no_grad()
def test_a_leaf_runs_in_float_as_it_is(leaf: Any, backend: str) -> None:
    model, batches = gated()
    with pytest.raises(UnseenOpError):
        prepare(model, batches[0], backend)(batches[1])
    prepared = prepare(model, batches[0], backend, leaf=leaf)
    for x in batches:
        assert torch.allclose(prepared(x), model(x), atol=1e-5)
    converted = convert(prepared)
    for x in batches * 2:
        assert decibels(model(x), converted(x)) > 30
    assert {row.module for row in coverage(converted).rows if row.module} == {"first", "last"}


def test_a_leaf_is_trained_in_float() -> None:
    model, batches = gated()
    prepared: Any = prepare(model.train(), batches[0], qat=True, leaf="gate")
    before = copy.deepcopy(prepared.gate.fc.weight)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    prepared.gate.forward = lambda x: F.relu(prepared.gate.fc(x))  # autograd takes no writes past its count
    for x in batches:
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, prepared.gate.fc.weight)


def test_a_leaf_that_is_not_there_is_refused() -> None:
    model, batches = gated()
    with pytest.raises(CaptureError, match="did you mean gate"):
        prepare(model, batches[0], leaf="gat")


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.more, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x))
        if x.abs().max() > 1.0:
            y = self.more(y)
        made: Tensor = self.head(y)
        return made


def early_exit() -> tuple[EarlyExit, Any, Any, list[Tensor]]:
    torch.manual_seed(0)
    model, batches = EarlyExit().eval(), [torch.randn(16, 8), torch.rand(16, 8) * 0.5]
    prepared = prepare(model, batches)
    for x in batches:
        prepared(x)
    return model, prepared, convert(prepared), batches


@torch.no_grad()
def test_calls_are_compared_with_those_of_the_float_model() -> None:
    model, prepared, converted, batches = early_exit()
    found = compare(prepared, converted, batches)
    assert [(row.op, row.module, row.calls) for row in found.rows] == [
        ("linear", "stem", 2),
        ("relu", "", 2),
        ("linear", "more", 1),
        ("linear", "head", 2),
    ]
    assert all(20 < row.sqnr < 70 for row in found.rows)
    expected = decibels(torch.cat([model(x) for x in batches]), torch.cat([converted(x) for x in batches]))
    assert found.sqnr == pytest.approx(expected, abs=1e-3)
    head = next(row for row in found.rows if row.module == "head")  # gives what the model gives
    assert head.sqnr == pytest.approx(expected, abs=1e-3)
    assert found.worst(1)[0].sqnr == min(row.sqnr for row in found.rows)
    assert json.loads(found.to_json())["rows"][2]["module"] == "more"
    assert "linear" in str(found)
    assert not found.notes


@torch.no_grad()
def test_a_layer_that_is_spoiled_shows() -> None:
    _, prepared, _, batches = early_exit()
    prepared(batches[0] * 1000)  # the scale of the first layer is far too large now
    found = compare(prepared, convert(prepared), batches)
    assert found.rows[0].sqnr < 10


@torch.no_grad()
def test_comparing_changes_neither_statistics_nor_buffers() -> None:
    _, prepared, converted, batches = early_exit()
    before = [converted(x) for x in batches]
    compare(prepared, converted, [x * 1000 for x in batches])
    again = convert(prepared)
    for x, expected in zip(batches, before, strict=True):
        assert torch.equal(again(x), expected)
        assert torch.equal(converted(x), expected)


class Undecided(EarlyExit):
    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        z = self.more(y) if (y - y.round(decimals=4)).abs().max() > 2e-5 else self.head(y)
        return F.relu(z)


@torch.no_grad()
def test_models_that_take_different_ways_are_compared_up_to_there() -> None:
    torch.manual_seed(0)
    model = Undecided().eval()
    model.stem.weight.copy_(torch.eye(8))
    model.stem.bias.zero_()
    rough, smooth = torch.rand(4, 8), (torch.rand(4, 8) * 1e4).round() / 1e4
    prepared = prepare(model, [rough, smooth])
    prepared(rough)
    prepared(smooth)
    found = compare(prepared, convert(prepared), [smooth])
    assert found.notes == ("in 1 batches the models took different ways: compared up to there",)
    assert [row.module for row in found.rows][:1] == ["stem"]


def test_what_cannot_be_compared_is_refused() -> None:
    _, prepared, converted, batches = early_exit()
    with pytest.raises(InputError, match="prepared model and the converted one"):
        compare(converted, prepared, batches)
    with pytest.raises(DataError, match="no batches"):
        compare(prepared, converted, [])
