"""Where integers begin and end: quantize and dequantize ops spelled out in ATen primitives."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quantc.integer.arithmetic import aten
from quantc.program import Program
from quantc.qdq import is_dequantize, is_quantize
from quantc.types import TensorType, tensor_type


def open_boundaries(program: Program) -> int:
    """Replace every quantize and dequantize op by ATen ops with the same bits. Says how many there were."""
    here = [node for node in program.nodes() if (is_quantize(node) or is_dequantize(node)) and node.users]
    for node in here:
        program.replace(node, _spelled(program, node))
    return len(here)


def _spelled(program: Program, node: fx.Node) -> fx.Node:
    """The ops that a quantize or dequantize node stands for."""

    def emit(target: Any, *args: Any, dtype: torch.dtype) -> fx.Node:
        kind = tensor_type(node)
        made = None if kind is None else TensorType(dtype, kind.shape)
        return program.emit(target, args, before=node, like=node, value=made)

    value, scale, zero_point, qmin, qmax, dtype = _parts(program, node)
    if is_dequantize(node):
        wide = emit(aten.to.dtype, value, torch.float32, dtype=torch.float32)
        if not isinstance(zero_point, int) or zero_point:
            wide = emit(aten.sub.Tensor, wide, zero_point, dtype=torch.float32)
        return emit(aten.mul.Tensor, wide, scale, dtype=torch.float32)
    inverse = 1.0 / scale if isinstance(scale, float) else emit(aten.reciprocal.default, scale, dtype=torch.float32)
    levels = emit(aten.mul.Tensor, value, inverse, dtype=torch.float32)
    levels = emit(aten.round.default, levels, dtype=torch.float32)
    levels = emit(aten.add.Tensor, levels, zero_point, dtype=torch.float32)
    levels = emit(aten.clamp.default, levels, qmin, qmax, dtype=torch.float32)
    return emit(aten.to.dtype, levels, dtype, dtype=dtype)


def _parts(program: Program, node: fx.Node) -> tuple[Any, ...]:
    """Value, scale, zero point, qmin, qmax and dtype; scales of channels shaped to go with the value."""
    if "per_tensor" in str(node.target):
        return tuple(node.args[:6])
    value, scale, zero_point, axis, qmin, qmax, dtype = node.args[:7]
    kind = tensor_type(node)
    rank = kind.rank if kind is not None else 0
    shape = [-1 if dim == axis else 1 for dim in range(rank)]

    def along(item: Any) -> Any:
        return program.emit(aten.reshape.default, (item, shape), before=node, like=item)

    return value, along(scale), along(zero_point), qmin, qmax, dtype
