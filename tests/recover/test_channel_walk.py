"""What the walk knows of constants and shapes before it labels anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.recover.channel_walk import Use, Walk


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.bias = self.one.bias
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)  # type: ignore[operator]
        result: Tensor = self.two(self.one(x)) + self.count
        return result


def test_constants_that_are_shared_or_written_are_not_changed() -> None:
    program = qc.pipelines.inference().run_on_copy(qc.capture(Shared().eval(), (torch.randn(2, 4),)))
    walk = Walk(program)
    names = {str(node.target) for node in program.nodes() if node.op == "get_attr" and walk.constant(node) is not None}
    assert names == {"one.weight", "two.weight"}
    shared = next(node for node in program.nodes() if str(node.target) in ("one.bias", "two.bias"))
    assert "read more than once" in walk.why_no_constant(shared)


def test_a_divisor_makes_what_it_is_divided_by() -> None:
    program = qc.pipelines.inference().run_on_copy(qc.capture(nn.Linear(4, 4).eval(), (torch.randn(2, 4),)))
    node = program.graph.find_nodes(op="get_attr")[0]
    walk = Walk(program)
    up, down = walk.classes.fresh((4,)), walk.classes.fresh((4,))
    times, by = Use(node, node, up, down), Use(node, node, up, down, divides=True)
    assert times.made is by.undone is up
    assert times.undone is by.made is down


def test_shapes_are_those_of_the_example_inputs() -> None:
    program = qc.pipelines.inference().run_on_copy(qc.capture(nn.Linear(4, 3).eval(), (torch.randn(5, 4),)))
    walk = Walk(program)
    (node,) = (node for node in program.nodes() if node.op == "call_function")
    assert walk.shape(node) == (5, 3)
    walk.fixed(node, "why")
    assert walk.labels[node].shape == (1, 1)
    assert walk.classes.solved().reasons == {0: "why"}
