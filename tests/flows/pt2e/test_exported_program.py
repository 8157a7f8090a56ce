"""An exported graph as a canonical Program, and the way back from its nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from quantc.capture.model_copies import Tensors
from quantc.flows.pt2e.exported_program import Correspondence, program_of
from quantc.ir.dialect import is_op
from quantc.pipeline.pipeline import Pipeline
from tests.support.pt2e_quantizers import exported

aten = torch.ops.aten


class Net(nn.Module):
    """A convolution with its norm, a dropout, and a product with a weight that is turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        self.drop, self.w = nn.Dropout(0.5), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Any:
        y = self.drop(self.norm(self.conv(x)).mean((2, 3)))
        return {"y": y @ self.w.t()}


X = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(0))


def made(tensors: Tensors = Tensors.SHARED, train: bool = False) -> tuple[Any, Correspondence]:
    torch.manual_seed(0)
    module = exported(Net().train(train), (X,))
    return module, Correspondence(program_of(module, tensors), module)


def node(found: Correspondence, *ops: str) -> fx.Node:
    made: fx.Node = next(each for each in found.program.graph.nodes if is_op(each, *ops))
    return made


def test_the_program_computes_what_the_graph_does_and_leaves_it_alone() -> None:
    module, found = made()
    code = module.code
    assert torch.equal(found.program(X)["y"], module(X)["y"])
    assert module.code == code


def test_a_graph_in_training_mode_becomes_a_program_for_inference() -> None:
    module, found = made(train=True)
    assert torch.equal(found.program(X)["y"], found.program(X)["y"])
    (dropped,) = module.graph.find_nodes(op="call_function", target=aten.dropout.default)
    assert dropped.args[2] is True


def test_tensors_are_shared_or_copied() -> None:
    for tensors, is_shared in ((Tensors.SHARED, True), (Tensors.COPIED, False)):
        module, found = made(tensors)
        weights = [found.program.tensor(each) for each in found.program.graph.nodes if each.op == "get_attr"]
        kept = {weight.data_ptr() for weight in weights if weight is not None}
        assert (module.get_parameter("conv.weight").data_ptr() in kept) is is_shared


def test_a_node_stands_for_the_exported_one_of_its_name() -> None:
    module, found = made()
    conv = node(found, "conv2d")
    exported_conv = found.node(conv)
    assert exported_conv is not None
    assert exported_conv.target is aten.conv2d.default
    assert exported_conv.graph is module.graph


def test_the_result_of_a_layer_whose_norm_was_folded_is_that_of_the_norm() -> None:
    _, found = made()
    assert (result := found.result(node(found, "conv2d"))) is not None
    assert result.target is aten.conv2d.default
    Pipeline.parse("fuse{arithmetic=keep},eliminate-dead").run(found.program)
    fused = Correspondence(found.program, found.module)
    behind = fused.result(node(fused, "conv2d"))
    assert behind is not None
    assert behind.target is aten.batch_norm.default


def test_operands_are_edges_of_the_exported_graph() -> None:
    _, found = made()
    conv = node(found, "conv2d")
    edge: Any = found.edge(conv, 1, by_channel=True)
    assert (edge[0].target, edge[1].target) == ("conv.weight", aten.conv2d.default)


def test_a_weight_with_channels_is_taken_before_it_is_turned_around() -> None:
    _, found = made()
    product = node(found, "linear", "matmul")
    if not is_op(product, "linear"):
        Pipeline.parse("canonicalize").run(found.program)
        product = node(found, "linear", "matmul")
    edge: Any = found.edge(product, 1, by_channel=True)
    whole: Any = found.edge(product, 1, by_channel=False)
    assert edge[0].target == "w"
    assert whole[1].target is aten.matmul.default
