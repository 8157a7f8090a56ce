"""The part of a program that was seen in one module, as a program of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows.tracing import prepare
from quantc.flows.tracing.slicing import subgraph
from quantc.ir.program import attribute
from tests.support.traced_runs import (
    floats,
    nested,
    state,
    trace_of,
)


def test_subgraphs_are_programs_that_compute_what_the_module_does() -> None:
    model, prepared, x = nested()
    (graph,) = state(prepared, "deep.0").subgraphs
    with torch.no_grad():
        y = torch.relu(model.get_submodule("stem")(x))
        (found,) = floats(graph(y))
        torch.testing.assert_close(found, model.get_submodule("deep.0")(y))
    whole = trace_of(prepared).held
    names = {node.name for node in graph.graph.nodes if node.op == "call_function"}
    assert graph.plan.outcomes == {site: row for site, row in whole.plan.outcomes.items() if site.node in names}
    assert graph.plan.outcomes
    others = state(prepared, "deep.1").subgraphs[0].graph.nodes
    assert not {node.name for node in others if node.op == "call_function"} & names


def test_what_is_read_from_elsewhere_is_an_input_and_what_is_read_elsewhere_a_result() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            return self.b(y) + y

    torch.manual_seed(0)
    model, x = Parts().eval(), torch.randn(2, 3)
    prepared = prepare(model, x)
    program = trace_of(prepared).held
    calls = {call.number: call.name for call in trace_of(prepared).calls}
    last = [number for number, name in calls.items() if name != "linear"]
    sums = subgraph(program, last, "sums")
    assert sums.name == "sums"
    assert len(sums.signature.inputs) == 2
    with torch.no_grad():
        y = model.a(x)
        (found,) = floats(sums(*([model.b(y), y] if "linear_1" in sums.signature.inputs[0].name else [y, model.b(y)])))
        assert torch.equal(found, model(x))
    products = subgraph(program, [number for number in calls if number not in last], "products")
    assert [row.name for row in products.signature.inputs] == [row.name for row in program.signature.inputs]
    with torch.no_grad():
        found_y, found_b = floats(products(x))
        assert torch.equal(found_y + found_b, model(x))


def test_tensors_are_those_of_the_program() -> None:
    _, prepared, _ = nested()
    program = trace_of(prepared).held
    (part,) = state(prepared, "deep.0").subgraphs
    weights = [node.target for node in part.graph.nodes if node.op == "get_attr"]
    assert weights
    assert all(attribute(part.root, str(name)) is attribute(program.root, str(name)) for name in weights)


def test_groups_of_other_modules_are_left_out() -> None:
    _, prepared, _ = nested()
    program = trace_of(prepared).held
    (part,) = state(prepared, "deep.0").subgraphs
    names = {node.name for node in part.graph.nodes}
    assert 0 < len(part.plan.groups) < len(program.plan.groups)
    assert all(any(site.node in names for site in group.places) for group in part.plan.groups)
