"""One call traced to ATen nodes: its tensors, its writes, and calls that no graph expresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from quantc.capture.runtime.call_tracing import aims_of, tensors_in, trace_call, without_copies_back

aten = torch.ops.aten


def test_a_call_becomes_aten_nodes_and_writes_go_to_copies() -> None:
    x = torch.tensor([-1.0, 2.0])
    traced = trace_call(torch.relu_, ((x,), {}), (0,))
    assert traced is not None
    made, written = traced(x)
    assert (made.tolist(), written.tolist(), x.tolist()) == ([0.0, 2.0], [0.0, 2.0], [-1.0, 2.0])
    assert {node.target for node in traced.graph.nodes} >= {aten.clone.default, aten.relu_.default}


def test_a_tensor_that_a_call_is_given_twice_is_one() -> None:
    x = torch.tensor([1.0, 2.0])
    traced = trace_call(Tensor.add_, ((x, x), {}), (0,))
    assert traced is not None
    assert [made.tolist() for made in traced(x, x)] == [[2.0, 4.0], [2.0, 4.0]]


def test_a_call_that_branches_on_data_has_no_graph() -> None:
    def branch(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    assert trace_call(branch, ((torch.ones(2),), {}), ()) is None


def test_tensors_in_containers_and_dataclasses_are_found_in_order() -> None:
    @dataclass
    class Box:
        first: Tensor
        rest: list[Any]

    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [len(x) for x in tensors_in({"k": [a, Box(b, [3, c])], "n": None})] == [1, 2, 3]


def test_the_inputs_that_a_graph_writes_to_are_known_through_views() -> None:
    def body(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        y[0].add_(x[0])
        return z + 1

    traced = make_fx(body)(torch.ones(2), torch.ones(2), torch.ones(2))
    assert aims_of(traced) == {1}


def test_copies_back_to_inputs_go_and_other_copies_stay() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        made = torch.empty_like(x)
        made.copy_(y)
        x.copy_(y * 2)
        return made

    traced = without_copies_back(make_fx(body)(torch.ones(2), torch.ones(2)))
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(aten.copy_.default) == 1
