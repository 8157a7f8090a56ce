"""The tracer: modules followed down to ATen, written values under their names, and origins of each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from quantc.capture.leaf_modules import LeafSelector
from quantc.capture.refused_trace import RefusedError
from quantc.capture.symbolic.tracer import AtenTracer
from tests.support.symbolic_traces import traced

X = torch.arange(8.0).reshape(2, 4)


def test_modules_of_torch_are_followed_to_their_ops() -> None:
    trace = traced(lambda s, x: s.body(x), X, body=lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Dropout(0.5)))
    assert trace.names == ["linear.default", "relu.default", "dropout.default"]
    assert torch.equal(trace(X), trace.model(X))


def test_each_call_knows_the_module_and_the_line_that_made_it() -> None:
    trace = traced(lambda s, x: s.body(x) + 1, X, body=lambda: nn.Sequential(nn.Linear(4, 3)))
    rows = {node.name: trace.tracer.origins[node] for node in trace.graph.nodes if node.op == "call_function"}
    assert (rows["linear"].module_path, rows["linear"].class_name) == ("body.0", "Linear")
    assert (rows["add"].module_path, rows["add"].class_name) == ("", "Edge")
    assert {row.file for row in rows.values()} == {__file__}


def test_leaves_are_called_whole() -> None:
    leaves = LeafSelector(frozenset({"fc"}), ())
    trace = traced(lambda s, x: torch.relu(s.fc(x)), X, fc=lambda: nn.Linear(4, 3), leaves=leaves)
    assert trace.names[0] == "fc"
    assert not list(trace.graph.find_nodes(op="get_attr"))


def test_a_tensor_written_in_place_is_the_new_value_under_all_its_names() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        z = y
        y.add_(1)
        functional.relu_(z)
        return z - y

    trace = traced(forward, X)
    assert torch.equal(trace(X), torch.zeros(2, 4))


def test_buffers_that_are_written_are_read_with_their_new_value() -> None:
    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

    def forward(self: Any, x: Tensor) -> Any:
        self.held.count += 1
        return x + self.held.count

    trace = traced(forward, X, held=Counting)
    assert torch.equal(trace(X), X + 1)

    def by_method(self: Any, x: Tensor) -> Any:
        self.held.count.add_(1)
        return x + self.held.count

    written, read = (node for node in traced(by_method, X, held=Counting).graph.nodes if node.op == "call_function")
    assert read.args[1] is written


def test_shapes_that_change_in_place_keep_the_memory() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x + 0
        y.unsqueeze_(0)
        y.add_(1)
        return y

    trace = traced(forward, X)
    assert trace.names == ["add.Tensor", "unsqueeze.default", "add_.Tensor"]
    assert torch.equal(trace(X), (X + 1).unsqueeze(0))


def test_calls_that_give_back_their_argument_are_no_copies() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x + 0
        y.contiguous().add_(1)
        return y

    assert torch.equal(traced(forward, X)(X), X + 1)


def test_several_results_are_items_with_their_names() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        found = x.max(1)
        parts = x.chunk(2, 1)
        assert len(parts) == 2
        return found.values + found.indices + parts[0].sum(1)

    assert torch.equal(traced(forward, X)(X), X.max(1).values + X.max(1).indices + X[:, :2].sum(1))


def test_a_tensor_is_iterated_where_its_length_is_known() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        first, second = x
        return first - second

    assert torch.equal(traced(forward, X)(X), X[0] - X[1])
    with pytest.raises(RefusedError, match="looped over"):
        traced(lambda s, x: sum(row for row in x))


def test_branches_on_data_are_refused_with_the_value_that_decides() -> None:
    with pytest.raises(RefusedError, match=r"branch depends on the value of gt"):
        traced(lambda s, x: x if (x.sum() > 0) else -x, X)


def test_regions_without_gradients_are_calls_in_training_alone() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x + 1

    inferring, training = traced(forward, X), traced(forward, X, training=True)
    assert inferring.names == ["add.Tensor"]
    assert len(training.names) == 3
    assert inferring.tracer.changes_grad_mode
    assert training.tracer.changes_grad_mode
    assert not traced(lambda s, x: x + 1, X).tracer.changes_grad_mode


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_generators_and_outs_of_another_size_are_refused() -> None:
    generator = torch.Generator()
    for forward, word in (
        (lambda s, x: x + torch.rand(2, 4, generator=generator), "Generator"),
        (lambda s, x: torch.add(x, 1, out=torch.empty(7)), "out="),
    ):
        with pytest.raises(RefusedError, match=word):
            traced(forward, X)


def test_batch_norms_are_traced_without_a_rank() -> None:
    trace = traced(lambda s, x: s.norm(x), norm=lambda: nn.BatchNorm1d(4))
    assert torch.equal(trace(X), trace.model(X))


def test_modules_made_in_forward_are_code_of_their_maker() -> None:
    trace = traced(lambda s, x: nn.Sequential(nn.ReLU())(x), X)
    assert trace.names == ["relu.default"]


def test_a_tracer_is_started_by_its_own_way_in() -> None:
    tracer = AtenTracer(LeafSelector(frozenset(), ()), None, is_training=False)
    with pytest.raises(RefusedError, match="trace_into"):
        tracer.trace(nn.ReLU())
    assert isinstance(traced(lambda s, x: x + 1).graph, fx.Graph)
