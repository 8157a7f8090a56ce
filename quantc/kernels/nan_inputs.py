"""NaN in what a program is called with: integers have no value for it, so that it is refused where it would be rounded.

A number that is not finite but has a sign goes to an end of the grid, in every form of a program. NaN has no place: the
Q/DQ and the integer form follow torch's op, which yields level 0 for it, and kernels of torch yield the highest. What
would come out has nothing to do with the float model, which yields NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quantc.errors import InputError
from quantc.integer.library import op_of
from quantc.program import Program
from quantc.qdq import is_dequantize, is_quantize
from quantc.types import dtype_of


@dataclass(frozen=True, slots=True)
class NanGuard:
    """The inputs of a program that are quantized on scales that were settled before it runs."""

    inputs: tuple[tuple[int, str], ...]
    """Their positions and names."""

    @staticmethod
    def of(program: Program) -> NanGuard:
        sources = {_origin(node.args[0]) for node in program.graph.nodes if is_quantize(node)}
        placeholders = program.graph.find_nodes(op="placeholder")
        found = ((at, node) for at, node in enumerate(placeholders) if node in sources)
        return NanGuard(tuple((at, node.name) for at, node in found if dtype_of(node) is torch.float32))

    def check(self, leaves: Sequence[Any]) -> None:
        """Refuse NaN. To add up a tensor takes a tenth of the time that looking at each number would."""
        for at, name in self.inputs:
            x = leaves[at]
            if math.isnan(x.sum().item()) and bool(x.isnan().any()):
                raise InputError(
                    f"there is NaN in {name}, and integers have no value for it",
                    where="it is quantized with a scale that was calibrated",
                    advice="look for it before the call, with torch.isnan; the float model yields NaN for such inputs",
                )


def _origin(node: Any) -> fx.Node:
    """What a node is computed of in float, operand by operand the first."""
    while node.op == "call_function" and node.all_input_nodes and not (is_dequantize(node) or op_of(node.target)):
        node = node.all_input_nodes[0]
    found: fx.Node = node
    return found
