"""Regions under no_grad, back in the graph around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows.pt2e.regions import inline_regions
from tests.support.pt2e_quantizers import exported


class Regions(nn.Module):
    """A region in a region, one with two results, and a weight that is read inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.fc(x)
            with torch.enable_grad():
                z = y.relu() + self.fc.weight
        with torch.no_grad():
            last, more = z * 2, z.sin()
        return last + y, more - z


X = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))


def calls(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_ops_of_regions_come_into_the_graph_and_compute_the_same() -> None:
    torch.manual_seed(0)
    module = exported(Regions(), (X,))
    expected = module(X)
    assert any("wrap_with_set_grad" in name for name in calls(module))
    assert inline_regions(module) >= 2
    module.graph.lint()
    module.recompile()
    names = ["linear", "relu", "add", "mul", "sin", "add", "sub"]
    assert [name.split(".")[1] for name in calls(module)] == names
    for found, wanted in zip(module(X), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_graph_without_regions_is_left_as_it_is() -> None:
    module = exported(nn.Sequential(nn.Linear(3, 3)), (X,))
    code = module.code
    assert inline_regions(module) == 0
    module.recompile()
    assert module.code == code


def test_nodes_keep_the_modules_they_come_from() -> None:
    module = exported(Regions(), (X,))
    inline_regions(module)
    (linear,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.linear.default)
    assert any("fc" in path for path, _ in linear.meta["nn_module_stack"].values())


def test_tensors_of_a_region_do_not_take_the_names_of_others() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x + torch.tensor([1.0, 2.0, 3.0])
            with torch.no_grad():
                return y * torch.tensor([4.0, 5.0, 6.0])

    module = exported(Same(), (X,))
    expected = (X + torch.tensor([1.0, 2.0, 3.0])) * torch.tensor([4.0, 5.0, 6.0])
    inline_regions(module)
    module.recompile()
    assert torch.equal(module(X), expected)
