"""Symbolic traces of single functions: the calls they become, and those run on real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from quantc.capture.export.dimensions import DynamicDim
from quantc.capture.leaf_modules import LeafSelector
from quantc.capture.symbolic.trace_inputs import TracedInputs
from quantc.capture.symbolic.tracer import AtenTracer
from tests.support.edge_models import module

Marks = Mapping[tuple[int, int], DynamicDim]


@dataclass(frozen=True)
class Trace:
    """A trace, with the tracer and the inputs it was made with."""

    model: nn.Module
    tracer: AtenTracer
    inputs: TracedInputs
    graph: fx.Graph

    @property
    def calls(self) -> list[str]:
        """Each call as text: `add.Tensor(x, 1)`."""
        return [
            f"{str(node.target).removeprefix('aten.')}({', '.join(map(str, node.args))})"
            for node in self.graph.nodes
            if node.op.startswith("call_")
        ]

    @property
    def names(self) -> list[str]:
        """The names of what is called."""
        return [call.partition("(")[0] for call in self.calls]

    def __call__(self, *inputs: Tensor) -> Any:
        """The result of the graph on real tensors; one alone where there is one."""
        root = copy.deepcopy(self.model)
        for name, tensor in self.tracer.state.constants.items():
            if not hasattr(root, name):
                root.register_buffer(name, tensor)
        for node in self.graph.nodes:
            node.meta.pop("is_wrapped", None)  # else the module's code registers its functions with torch.fx for good
        found = fx.GraphModule(root, self.graph)(*inputs)
        return found[0] if len(found) == 1 else found


def traced(
    forward: Callable[..., Any],
    *args: Any,
    marks: Marks | None = None,
    training: bool = False,
    leaves: LeafSelector | None = None,
    **parts: Callable[[], Any],
) -> Trace:
    """Trace a function `forward(self, ...)` on these examples; without any, no shapes are known."""
    torch.manual_seed(0)
    model: nn.Module = module(forward, **parts)().train(training)
    fakes = None
    if args:
        shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False) if marks else None
        fakes = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    tracer = AtenTracer(leaves or LeafSelector(frozenset(), ()), fakes, is_training=training)
    inputs = TracedInputs(model, args or None, {}, fakes, dict(marks or {}))
    return Trace(model, tracer, inputs, tracer.trace_into(model, inputs.build))
