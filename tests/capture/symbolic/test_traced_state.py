"""Names of a model's tensors while it is traced, and the node that is the value of each."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from quantc.capture.symbolic.traced_state import TensorState


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(1))
        self.a.plain = torch.ones(2)


def learned() -> tuple[Model, TensorState]:
    model, state = Model(), TensorState(None)
    state.learn(model)
    return model, state


def nodes(*names: str) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.create_node("get_attr", name) for name in names]


def test_tensors_have_their_first_name() -> None:
    model, state = learned()
    assert [state.name(x) for x in (model.a.weight, model.b.weight, model.b.bias)] == ["a.weight", "a.weight", "b.bias"]
    assert state.constants == {"a.plain": model.a.plain}


def test_tensors_made_in_forward_become_constants() -> None:
    _, state = learned()
    made, other = torch.ones(3), torch.ones(3)
    assert not state.knows(made)
    name = state.name(made)
    assert state.name(made) == name != state.name(other)
    assert state.knows(made)
    assert state.constants[name] is made


def test_the_tensor_that_a_node_reads_is_known_by_every_name() -> None:
    model, state = learned()
    tied, count, missing = nodes("b.weight", "count", "nothing")
    assert state.real(tied) is model.a.weight
    assert state.real(count) is model.count
    assert state.real(missing) is None
    graph = fx.Graph()
    assert state.real(graph.placeholder("count")) is None


def test_a_write_moves_the_value_and_another_follows_it() -> None:
    _, state = learned()
    source, first, second, stranger = nodes("count", "x", "y", "z")
    state.enter("count", source)
    state.moved(source, first)
    state.moved(first, second)
    assert state.current["count"] is second
    assert state.source["count"] is source
    state.moved(stranger, first)  # the value of no tensor
    assert state.current["count"] is second


def test_assigned_buffers_are_remembered_with_where_they_are_stored() -> None:
    _, state = learned()
    source, value = nodes("count", "x")
    state.enter("count", source)
    state.assign("count", source)
    assert state.assigned == {}  # `self.count = self.count` stores nothing
    state.assign("count", value)
    assert state.assigned == {"count": source}
    assert state.current["count"] is value


def test_fakes_are_made_once_and_only_where_shapes_are_tracked() -> None:
    x = torch.ones(2, 3)
    assert TensorState(None).fake(x) is None
    state = TensorState(FakeTensorMode())
    found = state.fake(x)
    assert isinstance(found, FakeTensor)
    assert found.shape == (2, 3)
    assert state.fake(x) is found


def test_the_device_is_that_of_the_model() -> None:
    assert TensorState(None).device == torch.device("cpu")
    state = TensorState(None)
    state.learn(nn.Linear(2, 2, device="meta"))
    assert state.device == torch.device("meta")
