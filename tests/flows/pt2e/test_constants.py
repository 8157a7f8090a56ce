"""What nodes of an exported graph come to that depend on nothing but the model's own tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from quantc.flows.pt2e.constants import Constants, overload_of
from quantc.qdq.registration import decomposed_ops
from tests.support.pt2e_quantizers import exported

aten = torch.ops.aten


class Net(nn.Module):
    """A weight that is computed, a buffer that is written to through a view, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.count = nn.Parameter(torch.arange(4.0).reshape(2, 2)), nn.Buffer(torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        self.count[:1].add_(1)
        return x @ (self.w.t() * 2 + torch.rand(2)) + (self.w.t() * 2).relu() + self.count * 2


def by_target(module: fx.GraphModule) -> dict[Any, list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in module.graph.nodes:
        found.setdefault(node.target, []).append(node)
    return found


def test_what_depends_on_weights_alone_is_computed() -> None:
    model = Net()
    module = exported(model, (torch.ones(2, 2),))
    constants, nodes = Constants(module), by_target(module)
    value = constants.value(nodes[aten.relu.default][0])
    assert torch.equal(value if value is not None else torch.empty(0), torch.tensor([[0.0, 4.0], [2.0, 6.0]]))
    assert constants.value(nodes[aten.relu.default][0]) is value


def test_inputs_noise_and_what_is_written_to_are_not_constant() -> None:
    module = exported(Net(), (torch.ones(2, 2),))
    constants, nodes = Constants(module), by_target(module)
    assert constants.value(nodes[aten.matmul.default][0]) is None
    assert [constants.value(node) for node in nodes[aten.rand.default]] == [None]
    placeholder = next(node for node in module.graph.nodes if node.op == "placeholder")
    assert constants.value(placeholder) is None
    known = {node.target: constants.value(node) for node in module.graph.nodes if node.op == "get_attr"}
    assert known["count"] is None
    assert known["w"] is not None


def test_dequantize_ops_are_not_computed_so_weights_stay_quantized() -> None:
    ops: Any = decomposed_ops()
    graph, root = fx.Graph(), nn.Module()
    root.register_buffer("w", torch.tensor([0.5, 1.0]))
    weight = graph.create_node("get_attr", "w")
    ends = (0.5, 0, -128, 127, torch.int8)
    quantized = graph.create_node("call_function", ops.quantize_per_tensor.default, (weight, *ends))
    again = graph.create_node("call_function", ops.dequantize_per_tensor.default, (quantized, *ends))
    graph.output(again)
    constants = Constants(fx.GraphModule(root, graph))
    value = constants.value(quantized)
    assert value is not None
    assert value.tolist() == [1, 2]
    assert constants.value(again) is None


def test_a_chain_of_any_length_is_computed() -> None:
    graph, root = fx.Graph(), nn.Module()
    root.register_buffer("w", torch.zeros(1))
    node = graph.create_node("get_attr", "w")
    for _ in range(3000):
        node = graph.create_node("call_function", aten.add.Tensor, (node, 1))
    graph.output(node)
    value = Constants(fx.GraphModule(root, graph)).value(node)
    assert value is not None
    assert value.item() == 3000


def test_an_op_stands_for_its_only_overload() -> None:
    assert overload_of(aten.relu.default) is aten.relu.default
    assert overload_of(torch.ops.quantized_decomposed.choose_qparams.tensor).__class__ is aten.relu.default.__class__
    assert overload_of(aten.add) is None
    assert overload_of(torch.add) is None
