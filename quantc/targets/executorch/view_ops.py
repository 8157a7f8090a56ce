"""Emission of value-preserving ops for the delegate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.qdq.registration import decomposed_ops


def reshape_sizes(shape: Sequence[int | str]) -> list[int]:
    """Sizes for a reshape, with -1 for the dynamic one."""
    return [size if isinstance(size, int) else -1 for size in shape]


@dataclass(frozen=True, eq=False)
class Mover:
    """Emits ops before a node, made for the op `name`, to which reports attribute them; for none, if it is empty."""

    program: Program
    before: fx.Node
    name: str = ""

    def emit(self, target: Any, args: tuple[Any, ...], kind: TensorType) -> fx.Node:
        made = self.program.emit(target, args, before=self.before, value=kind)
        self.program.plan.made_for[made] = self.name
        return made

    def move(self, x: fx.Node, op: Any, how: tuple[Any, ...], kind: TensorType) -> fx.Node:
        """Emit a value-preserving op. A dequantized input is requantized and dequantized again after it: so the
        delegate knows that it may move levels.
        """
        moved, ops = self.emit(op, (x, *how), kind), decomposed_ops()
        if x.target is not ops.dequantize_per_tensor.default:
            return moved
        grid: Any = x.args[1:]
        levels = self.emit(ops.quantize_per_tensor.default, (moved, *grid), TensorType(grid[-1], kind.shape))
        return self.emit(x.target, (levels, *grid), kind)
