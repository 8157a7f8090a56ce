"""Which calls of a model are one fused op, found in the prepared program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows.tracing import convert, prepare
from quantc.flows.tracing.fusion_groups import Units
from tests.support.traced_runs import trace_of


class Net(nn.Module):
    """A layer with a norm, moves, a sum whose result is read twice, and a function that no rule takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.conv(x)))
        return self.fc(torch.sin(y.flatten(1)))


X = torch.randn(2, 2, 2, 2, generator=torch.Generator().manual_seed(0))


def made(model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return prepare((model or Net()).eval(), X, **options)


def units(prepared: Any) -> Units:
    trace = trace_of(prepared)
    return Units(trace.held, trace.calls)


def members(prepared: Any) -> set[tuple[str, ...]]:
    """The fused ops, by the names of their calls."""
    calls = trace_of(prepared).calls
    found = units(prepared).build()
    return {tuple(calls[number].name for number in unit.members) for unit in found.values()}


def test_a_layer_its_norm_and_its_activation_are_one_op() -> None:
    assert members(made()) == {("conv2d", "batch_norm", "relu"), ("linear",)}


def test_every_call_is_part_of_one_op_at_most() -> None:
    found = units(made()).build()
    for number, unit in found.items():
        assert number in unit.members
    assert sum(len(unit.members) for unit in {id(unit): unit for unit in found.values()}.values()) == len(found)


def test_the_value_of_a_norm_that_was_folded_is_that_of_its_layer() -> None:
    prepared = made()
    own = units(prepared)
    calls = {call.name: call for call in own.calls}
    assert calls["batch_norm"].number not in own.of_call
    folded, conv = own.value(calls["batch_norm"].makes[0]), own.value(calls["conv2d"].makes[0])
    assert folded is conv
    assert folded is not None
    assert own.value("no such node") is None


def test_what_is_observed_is_noted_at_the_call_that_makes_it() -> None:
    prepared = made()
    watched, calls = units(prepared).watched(), trace_of(prepared).calls
    at = {calls[number].name if number >= 0 else "input" for number in watched}
    assert "input" in at
    groups = {group for rows in watched.values() for names in rows.values() for group in names}
    assert groups == {group.name for group in trace_of(prepared).held.plan.groups if group.name in groups}
    assert "batch_norm" not in at
    assert "conv2d" not in at


def test_ops_that_only_move_are_done_on_whatever_comes() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(2, 2), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            return self.last(torch.relu(self.fc(x)).transpose(1, 2).reshape(2, -1))

    assert members(made(Moves(), backend="qnnpack")) == {("linear", "relu"), ("linear",)}


def test_a_result_that_is_looked_at_elsewhere_is_not_fused_away() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            return torch.relu(y) + torch.sigmoid(y)

    assert ("conv2d", "relu") not in members(made(Twice()))


def test_nothing_is_lost_in_a_model_of_layers() -> None:
    own = units(made())
    own.build()
    assert own.lost == []
    assert own.several() == []


def test_a_call_that_is_several_ops_is_left_float() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            q = self.fc(x)
            return nn.functional.scaled_dot_product_attention(q, q, q)

    prepared = made(Attends())
    with torch.no_grad():
        prepared(X)
        quantized = convert(prepared)
        assert float((quantized(X) - prepared(X)).abs().max()) < 0.1
    assert members(prepared) == {("linear",)}


def test_in_training_what_rounds_the_operands_of_other_calls_is_known() -> None:
    prepared = made(qat=True)
    found = units(prepared)
    calls = trace_of(prepared).calls
    in_units = set(found.build())
    for number, rows in found.rounding().items():
        if number not in in_units:
            assert all(position < len(calls[number].reads) for position, _ in rows)
    assert {calls[number].name for number in found.rounding()} >= {"linear"}
