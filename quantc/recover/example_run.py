"""One run on the example inputs: the shape of every tensor, and the value of everything that is not a float tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantc.ir.dialect import SYMBOLIC
from quantc.ir.program import Program
from quantc.pipeline.numeric_guard import NodeByNode, isolated_run, why_not_guarded


@dataclass
class ExampleRun:
    """What ops read in one run that is not a float tensor: sizes, indices, masks."""

    shapes: dict[fx.Node, torch.Size] = field(default_factory=dict)
    floats: set[fx.Node] = field(default_factory=set)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """Numbers, and tensors of integers and booleans."""

    @classmethod
    def of(cls, program: Program) -> ExampleRun | str:
        """The run, or the reason why there is none."""
        if (reason := why_not_guarded(program, None)) is not None:
            return reason
        found = cls()
        with isolated_run(program, 0):
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in program.example_inputs or ()]
            _Recorder(program, found).run(*leaves, enable_io_processing=False)
        return found

    def shape(self, node: Any) -> torch.Size | None:
        return self.shapes.get(node) if isinstance(node, fx.Node) else None

    def repeat(self, node: fx.Node, operand: fx.Node, value: Tensor) -> Any:
        """The result of a call that reads `value` in place of one operand, and as recorded otherwise."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: value if each is operand else self.values[each])
        return node.target(*args, **kwargs)  # type: ignore[operator]


class _Recorder(NodeByNode):
    def __init__(self, program: Program, found: ExampleRun) -> None:
        super().__init__(program)
        self.found = found

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found.shapes[n] = value.shape
            if value.is_floating_point():
                self.found.floats.add(n)
            else:
                self.found.values[n] = value
        elif n.target in SYMBOLIC or isinstance(value, int | float | bool):
            self.found.values[n] = value
        return value
