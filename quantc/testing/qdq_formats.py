"""Quantization of tensors in a converted program, read from its quantize and dequantize ops alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantc.ir.dialect import operands
from quantc.ir.program import Program
from quantc.ir.site_index import operand_nodes
from quantc.qdq.ops import is_dequantize, is_quantize


@dataclass(frozen=True, eq=False)
class Form:
    """Qparams of a quantize or dequantize op."""

    scale: Tensor
    zero_point: Tensor
    axis: int | None
    qmin: int
    qmax: int
    dtype: torch.dtype

    @staticmethod
    def of(program: Program, node: fx.Node) -> Form:
        scale, zero_point, *rest = (_number(program, value) for value in node.args[1:])
        name = str(node.target)
        axis = rest.pop(0) if "per_channel." in name else 1 if "per_channel_group" in name else None
        qmin, qmax, dtype = rest[:3]
        return Form(torch.as_tensor(scale), torch.as_tensor(zero_point), axis, qmin, qmax, dtype)

    def equals(self, other: Form) -> bool:
        same = (self.axis, self.qmin, self.qmax, self.dtype) == (other.axis, other.qmin, other.qmax, other.dtype)
        return same and torch.equal(self.scale, other.scale) and torch.equal(self.zero_point, other.zero_point)

    def __str__(self) -> str:
        where = "" if self.axis is None else f" along axis {self.axis}"
        dtype = str(self.dtype).removeprefix("torch.")
        numbers = f" scale {float(self.scale):.4g}, zero point {int(self.zero_point)}" if self.axis is None else ""
        return f"{dtype} {self.qmin}..{self.qmax}{where}{numbers}"


def _number(program: Program, value: Any) -> Any:
    return program.tensor(value) if isinstance(value, fx.Node) else value


def read_form(program: Program, node: fx.Node, operand: int) -> Form | None:
    """Form in which a node reads an operand; None if as float."""
    source = operand_nodes(node)[operand]
    return Form.of(program, source) if is_dequantize(source) else None


def yielded_form(program: Program, node: fx.Node) -> Form | None:
    """Form in which all users read a node's result; None if some read it as float."""
    readers = list(node.users)
    if not readers or not all(is_quantize(reader) for reader in readers):
        return None
    return Form.of(program, readers[0])


def forms(program: Program) -> Iterator[tuple[fx.Node, Form]]:
    """Every quantize and dequantize op, with its form."""
    for node in program.nodes():
        if is_quantize(node) or is_dequantize(node):
            yield node, Form.of(program, node)


def argument_names(node: fx.Node) -> tuple[str, ...]:
    """For each operand of a node, the name of the argument it is (part of)."""
    names: list[str] = []
    for name, value in operands(node):
        map_arg(value, lambda _, name=name: names.append(name))  # type: ignore[misc]
    return tuple(names)
