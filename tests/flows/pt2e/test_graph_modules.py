"""Graph modules of this flow: copies that leave the caller's alone, and modes that are not switched in silence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops import while_loop

from quantc.capture.model_copies import Tensors
from quantc.flows.pt2e import (
    convert_pt2e,
    prepare_pt2e,
)
from quantc.flows.pt2e.graph_modules import (
    NotExportedError,
    check_graph_module,
    copied_graph,
    loop_bodies,
    own_copy,
    store,
    tensor_at,
)
from tests.support.pt2e_small import RESIDUAL, calibrated, captured, own


@pytest.mark.parametrize("flag", ["use_reference_representation", "fold_quantize"])
def test_flags_that_are_no_bools_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        convert_pt2e(calibrated(nn.Linear(2, 2), own(), torch.randn(1, 2)), **{flag: "yes"})  # type: ignore[arg-type]


def test_the_callers_models_are_not_changed() -> None:
    model, (batch,) = RESIDUAL.with_norms(), RESIDUAL.batches(1, seed=1)
    exported = captured(model, *batch)
    code, state = exported.code, copy.deepcopy(exported.state_dict())
    prepared = prepare_pt2e(exported, own())
    assert exported.code == code
    assert not any("quantization_annotation" in node.meta for node in exported.graph.nodes)
    with torch.no_grad():
        prepared(*batch)
    code = prepared.code
    first = convert_pt2e(prepared)
    assert prepared.code == code
    with torch.no_grad():
        prepared(*[3 * part for part in batch])  # and calibrated further
        assert not torch.equal(convert_pt2e(prepared)(*batch), first(*batch))
    assert all(torch.equal(value, state[name]) for name, value in exported.state_dict().items())


def test_modes_are_not_switched_behind_the_users_back() -> None:
    prepared = calibrated(nn.Linear(2, 2), own(), torch.randn(1, 2))
    for switch in (prepared.train, prepared.eval):
        with pytest.raises(NotImplementedError, match="move_exported_model_to_train"):
            switch()


def linear() -> Any:
    torch.manual_seed(0)
    return captured(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), torch.randn(3, 2))


def test_a_copied_graph_has_the_names_and_metadata_and_is_apart() -> None:
    graph = linear().graph
    copied = copied_graph(graph)
    assert [node.format_node() for node in copied.nodes] == [node.format_node() for node in graph.nodes]
    assert [node.meta for node in copied.nodes] == [node.meta for node in graph.nodes]
    next(iter(copied.nodes)).meta["mine"] = 1
    assert not any("mine" in node.meta for node in graph.nodes)
    named = {node.name for node in copied.nodes}
    assert copied.create_node("placeholder", "linear").name not in named


def test_buffers_are_copied_and_parameters_only_if_they_are_trained() -> None:
    model = linear()
    for tensors, is_shared in ((Tensors.SHARED, True), (Tensors.COPIED, False)):
        owned = own_copy(model, tensors)
        assert all(
            (parameter is model.get_parameter(name)) is is_shared for name, parameter in owned.named_parameters()
        )
        assert all(buffer is not model.get_buffer(name) for name, buffer in owned.named_buffers())
        assert torch.equal(owned(torch.ones(3, 2)), model(torch.ones(3, 2)))


def test_a_tensor_that_is_held_twice_is_copied_once() -> None:
    graph, root = fx.Graph(), nn.Module()
    shared = torch.ones(2)
    root.register_buffer("a", shared)
    root.register_buffer("b", shared)
    graph.output((graph.create_node("get_attr", "a"), graph.create_node("get_attr", "b")))
    module = fx.GraphModule(root, graph)
    owned = own_copy(module, Tensors.COPIED)
    assert owned.a is owned.b
    assert owned.a is not module.a


def test_what_is_no_graph_is_refused_with_the_verb() -> None:
    check_graph_module(linear(), "verb")
    with pytest.raises(NotExportedError, match="verb was given a Linear"):
        check_graph_module(nn.Linear(2, 2), "verb")


def test_tensors_are_read_and_put_at_dotted_names() -> None:
    root = nn.Module()
    root.part = nn.Linear(2, 2)
    fresh = torch.zeros(2, 2)
    store(root, "part.weight", fresh)
    assert tensor_at(root, "part.weight") is fresh
    assert "weight" in root.part._buffers
    parameter = nn.Parameter(fresh)
    store(root, "part.weight", parameter)
    assert tensor_at(root, "part.weight") is parameter
    assert list(root.part._buffers) == []
    assert tensor_at(root, "part") is None
    assert tensor_at(root, "part.missing.more") is None
    store(root, "alone", fresh)
    assert tensor_at(root, "alone") is fresh


def test_bodies_of_loops_are_found_by_their_names() -> None:
    class Loops(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]  # type: ignore[no-untyped-call]

    module = captured(Loops(), torch.ones(2))
    found = dict(loop_bodies(module))
    (name,) = found
    assert found[name] is getattr(module, name)
    assert any(node.target is torch.ops.aten.mul.Tensor for node in found[name].graph.nodes)
    assert loop_bodies(linear()) == []
