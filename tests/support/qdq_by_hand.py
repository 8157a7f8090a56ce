"""Programs with Q/DQ ops written node by node, for tests of what reads and lowers them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.program import Program, Stage
from quantc.qdq.registration import decomposed_ops
from tests.support.by_hand import Builder

BYTES = (0, 255, torch.uint8)
SIGNED = (-128, 127, torch.int8)
Ends = tuple[int, int, torch.dtype]


class QdqBuilder(Builder):
    """A builder that can quantize; constants are added as they come."""

    def constant(self, name: str, value: Tensor) -> fx.Node:
        self.root.register_buffer(name, value)
        return self.const(name)

    def quantize(self, value: fx.Node, scale: float, zero_point: int = 0, ends: Ends = BYTES) -> fx.Node:
        return self.call(decomposed_ops().quantize_per_tensor.default, value, scale, zero_point, *ends)

    def dequantize(self, levels: fx.Node, scale: float, zero_point: int = 0, ends: Ends = BYTES) -> fx.Node:
        return self.call(decomposed_ops().dequantize_per_tensor.default, levels, scale, zero_point, *ends)

    def fake(self, value: fx.Node, scale: float, zero_point: int = 0, ends: Ends = BYTES) -> fx.Node:
        """A value, quantized and dequantized."""
        return self.dequantize(self.quantize(value, scale, zero_point, ends), scale, zero_point, ends)

    def by_channel(
        self, name: str, levels: Tensor, scales: Tensor, axis: int = 0, zeros: Tensor | None = None
    ) -> fx.Node:
        """A stored weight with a scale for each channel, dequantized."""
        kept = [
            self.constant(name, levels),
            self.constant(f"{name}_scale", scales),
            self.constant(f"{name}_zero", torch.zeros_like(scales, dtype=torch.int64) if zeros is None else zeros),
        ]
        return self.call(decomposed_ops().dequantize_per_channel.default, *kept, axis, *SIGNED)

    def by_group(self, name: str, levels: Tensor, scales: Tensor, size: int) -> fx.Node:
        """A stored matrix with a scale for each group of a row, dequantized."""
        target = decomposed_ops().dequantize_per_channel_group.default
        kept = [
            self.constant(name, levels),
            self.constant(f"{name}_scale", scales),
            self.constant(f"{name}_zero", torch.zeros_like(scales, dtype=torch.int64)),
        ]
        return self.call(target, *kept, *SIGNED, size, torch.float32)

    def run_time(self, value: fx.Node, ends: Ends = BYTES) -> fx.Node:
        """A value on a grid that is found as the program runs, dequantized."""
        from operator import getitem

        ops = decomposed_ops()
        choice = self.call(ops.choose_qparams.tensor, value, ends[0], ends[1], 2.0**-12, ends[2])
        numbers = [self.call(getitem, choice, index) for index in range(2)]
        levels = self.call(ops.quantize_per_tensor.tensor, value, *numbers, *ends)
        return self.call(ops.dequantize_per_tensor.tensor, levels, *numbers, *ends)

    def done(self, *outputs: fx.Node) -> Program:
        return self.program(*outputs, stage=Stage.FOLDED)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]
