"""A reference for converted models with control flow: the float model itself, whose operands are rounded where the converted
program says so. It shares nothing with the flow's own interception: calls are told apart by the lines of the model's source."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from quantc.ir.program import Program

SPELLINGS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add", "add_": "add", "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul",
    "mul_": "mul", "__sub__": "sub", "__rsub__": "rsub", "__matmul__": "matmul", "relu_": "relu", "relu6": "clamp",
    "hardtanh": "clamp", "clamp_": "clamp", "boolean_dispatch": "max_pool2d",
}  # fmt: skip
"""Python's names of ops, and those of ATen."""
Key = tuple[Any, ...]


def op_of(node: fx.Node) -> str:
    """`conv2d` for `aten.conv2d.default`."""
    return str(node.target).partition(".")[2].partition(".")[0].rstrip("_")


def rounding(node: fx.Node) -> list[tuple[float, int, int, int] | None]:
    """How each operand of a node is rounded: scale, zero point, least and greatest level; None if it is not."""
    found: list[tuple[float, int, int, int] | None] = []
    for operand in node.args:
        if not isinstance(operand, fx.Node):
            continue
        is_rounded = "dequantize_per_tensor" in str(operand.target) and isinstance(operand.args[1], float)
        found.append(tuple(operand.args[1:5]) if is_rounded else None)  # type: ignore[arg-type]
    return found


class Rounding(TorchFunctionMode):
    """Rounds the operands of the ops that were quantized."""

    def __init__(
        self, model: nn.Module, captured: Program, converted: Program, file: str, examples: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self.model, self.file = model, file
        quantized = {node.name: node for node in converted.graph.nodes}
        self.nodes: dict[tuple[int, str], list[fx.Node | None]] = {}
        for node in captured.graph.nodes:
            origin = captured.origins.get(node)
            if origin is not None and node.op == "call_function" and str(node.target).startswith("aten."):
                self.nodes.setdefault((origin.line, op_of(node)), []).append(quantized.get(node.name))
        self.keys: dict[tuple[int, str], dict[Key, int]] = {}
        self.is_learning = True
        for x in examples:
            self.run(x.clone())
        self.is_learning = False

    def run(self, x: Tensor) -> Any:
        """What the model gives, rounded like the program."""
        with torch.no_grad(), self:
            return self.model(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        op = SPELLINGS.get(name, name)
        lines = self._lines()
        known = self.nodes.get((lines[0], op)) if lines else None
        if known is None:
            return func(*args, **(kwargs or {}))
        keys = self.keys.setdefault((lines[0], op), {})
        place = keys.setdefault(lines, len(keys)) if self.is_learning else keys.get(lines, len(known))
        node = None if self.is_learning or place >= len(known) else known[place]
        if node is None:
            return func(*args, **(kwargs or {}))
        rows = iter(rounding(node))
        given = [_rounded(x, next(rows, None)) if isinstance(x, Tensor) else x for x in args]
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        if not is_in_place and not (kwargs or {}).get("inplace", False):
            return func(*given, **(kwargs or {}))
        return args[0].copy_(func(given[0].clone(), *given[1:], **(kwargs or {})))

    def _lines(self) -> Key:
        """The places in the model's source that the call comes from, innermost first."""
        frame: FrameType | None = sys._getframe(2)
        found: list[int] = []
        first = 0
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                found.append(frame.f_lasti)
                first = first or frame.f_lineno
            frame = frame.f_back
        return (first, *found) if found else ()


def _rounded(x: Tensor, row: tuple[float, int, int, int] | None) -> Tensor:
    """A tensor, on a grid if there is one."""
    return x if row is None else torch.fake_quantize_per_tensor_affine(x.contiguous(), *row)
