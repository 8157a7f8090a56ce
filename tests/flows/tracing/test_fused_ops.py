"""Fused ops, each over the calls that it does the work of: what they read, when they run, and on which grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.flows.tracing import convert
from quantc.flows.tracing.fused_ops import Unit, behind_put_in, is_put_in, reach
from quantc.flows.tracing.traced_tensor import Levels, levels_on
from tests.support.traced_runs import calibrated, trace_of


class Net(nn.Module):
    """A convolution with its norm and ReLU, a sum, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.norm(self.conv(x))) + x
        return self.fc(y.mean((2, 3)))


X = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(0))


def made() -> tuple[Net, Any, Any]:
    torch.manual_seed(0)
    model = Net().eval()
    prepared = calibrated(model, [(X,)])
    return model, prepared, convert(prepared)


def unit_of(model: Any, name: str) -> Unit:
    trace = trace_of(model)
    found: list[Unit] = [
        trace.units[call.number] for call in trace.calls if call.name == name and call.number in trace.units
    ]
    return found[0]


def test_a_layer_runs_at_its_own_call_and_takes_those_behind_it() -> None:
    _, prepared, _ = made()
    unit = unit_of(prepared, "conv2d")
    names = [trace_of(prepared).calls[number].name for number in unit.members]
    assert names == ["conv2d", "batch_norm", "relu"]
    assert unit.is_fused
    assert unit.is_product
    assert unit.trigger == unit.members[0]
    assert unit.begins == {unit.members[0]: 0}
    assert unit.reading == (0,)


def test_a_sum_runs_when_both_its_operands_are_there() -> None:
    _, prepared, _ = made()
    calls = trace_of(prepared).calls
    sums = [unit for unit in trace_of(prepared).units.values() if len(unit.operands) == 2]
    for unit in sums:
        assert unit.trigger == max(operand.call for operand in unit.operands)
        assert "add" in calls[unit.trigger].name
        assert not unit.begins


def test_in_float_it_computes_what_its_calls_do() -> None:
    model, prepared, _ = made()
    unit = unit_of(prepared, "conv2d")
    with torch.no_grad():
        found = unit.run_float(trace_of(prepared).held, {0: X})
        torch.testing.assert_close(found, model.relu(model.norm(model.conv(X))))


def test_once_converted_it_reads_and_gives_bytes() -> None:
    model, _, quantized = made()
    unit, program = unit_of(quantized, "conv2d"), trace_of(quantized).held
    (grid,) = unit.grids
    assert grid is not None
    with torch.no_grad():
        by_floats = unit.run_quantized(program, {0: X}, "x86")
        by_bytes = unit.run_quantized(program, {0: levels_on(X, grid)}, "x86")
        again = unit.run_quantized(program, {0: levels_on(X, grid)}, "x86")  # bound to the kernel by then
        exact = model.relu(model.norm(model.conv(X)))
    assert unit.direct is not None
    for found in (by_floats, by_bytes, again):
        floats = found.floats() if type(found) is Levels else found
        step = unit.out_grid.scale if unit.out_grid is not None else grid.scale
        assert float((floats - exact).abs().max()) <= 2.5 * max(step, grid.scale)
    assert torch.equal(_bits(by_bytes), _bits(again))


def _bits(value: Any) -> Tensor:
    found: Tensor = value.levels if type(value) is Levels else value
    return found


def test_alike_grids_are_one_object() -> None:
    _, _, quantized = made()
    trace = trace_of(quantized)
    grids = [grid for unit in trace.units.values() for grid in (*unit.grids, unit.out_grid) if grid is not None]
    assert len({id(grid) for grid in grids}) == len(set(grids))


def test_settling_again_forgets_what_was_built() -> None:
    _, _, quantized = made()
    unit, program = unit_of(quantized, "conv2d"), trace_of(quantized).held
    unit.run_quantized(program, {0: X}, "x86")
    assert unit.computes
    unit.settle(program)
    assert unit.computes == {}
    assert unit.direct is None


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ((0, 1), 20),
        ((0, 2, 0), 30),
        ((1, "key"), 40),
        ((1, "list", 1), 51),
        ((0, 9), None),
        ((0, 2, 5), None),
        ((1, "missing"), None),
        ((0, 0, "no mapping"), None),
    ],
)
def test_arguments_are_found_by_their_paths(path: tuple[Any, ...], found: Any) -> None:
    assert reach((10, 20, [30]), {"key": 40, "list": (50, 51)}, path) == found


def test_what_was_put_in_is_looked_behind() -> None:
    _, _, quantized = made()
    graph: fx.Graph = trace_of(quantized).held.graph
    put_in = [node for node in graph.nodes if is_put_in(node)]
    assert {str(node.target).partition(".")[0] for node in put_in} == {"quantized_decomposed"}
    for node in put_in:
        assert not is_put_in(behind_put_in(node))
    (given,) = graph.find_nodes(op="placeholder")
    assert behind_put_in(given) is given
