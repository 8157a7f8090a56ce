"""Legalization of weight-only ops and grouped weights for XNNPACK and ExecuTorch's own kernels.

XNNPACK multiplies floats by linear weights of 8 or 4 bits with per-channel scales, and dynamically quantized int8 by
4-bit groups. Other linear layers dequantize their weight at run time, and convolution weights are dequantized here: a
float convolution in the delegate is many times faster than one outside it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.dialect import argument, is_op, ops_in
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.types import TensorType, tensor_type
from quantc.qdq.ops import is_dequantize
from quantc.qdq.registration import decomposed_ops
from quantc.targets.executorch.partitioning import give_name, name_of

aten = torch.ops.aten
GROUP = 32
"""XNNPACK takes groups of this many weights, and multiples."""
NIBBLE = (-8, 7)
CONVOLUTIONS = ops_in(Family.CONV, Family.CONV_TRANSPOSE)


def _constant(program: Program, node: Any) -> Tensor | None:
    """Value of a node that only dequantizes and moves constants; None for any other."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        return program.tensor(node)
    moves = (aten.reshape.default, aten.permute.default)
    if node.op != "call_function" or not (is_dequantize(node) or node.target in moves):
        return None
    args = [_constant(program, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
    if any(value is None and isinstance(arg, fx.Node) for value, arg in zip(args, node.args, strict=True)):
        return None
    target: Any = node.target
    made: Tensor = target(*args, **node.kwargs)
    return made


def _is_alone(node: fx.Node) -> bool:
    """True if an op's weight is quantized and its input is not."""
    weight = argument(node, "w")
    while isinstance(weight, fx.Node) and weight.target in (aten.reshape.default, aten.permute.default):
        weight = weight.all_input_nodes[0]
    return isinstance(weight, fx.Node) and is_dequantize(weight) and not is_dequantize(argument(node, "x"))


# -- groups --------------------------------------------------------------------------------------------------------


def is_grouped(node: fx.Node) -> bool:
    return is_dequantize(node) and "per_channel_group" in str(node.target)


def by_rows(program: Program, node: fx.Node) -> None:
    """Write groups that the delegate does not support as rows of a matrix: ExecuTorch has a kernel for those."""
    parts = [program.tensor(part) if isinstance(part, fx.Node) else None for part in node.args[:3]]
    low, high, dtype, size = node.args[3:7]
    levels, scales, zero_points = parts
    if levels is None or scales is None or zero_points is None or not isinstance(size, int):
        return
    if _takes_groups(node, zero_points):
        _warn_of_rounding(program, node, scales)
        return
    hint = str(node.all_input_nodes[0].target)
    rows = (levels.reshape(-1, size), scales.reshape(-1), zero_points.reshape(-1))
    names = (f"{hint}_rows", f"{hint}_row_scales", f"{hint}_row_zero_points")
    made = [program.constant(name, part.contiguous(), before=node) for name, part in zip(names, rows, strict=True)]
    target = decomposed_ops().dequantize_per_channel.default
    kind = TensorType(torch.float32, tuple(rows[0].shape))
    whole = program.emit(target, (*made, 0, low, high, dtype), before=node, like=node, value=kind)
    node.target, node.args, node.kwargs = aten.reshape.default, (whole, list(levels.shape)), {}


def _takes_groups(node: fx.Node, zero_points: Tensor) -> bool:
    """True if the delegate supports a grouped weight: 4-bit, symmetric, and multiplied by integers."""
    low, high, _, size = node.args[3:7]
    fits = (low, high) == NIBBLE and isinstance(size, int) and size % GROUP == 0 and not bool(zero_points.any())
    return fits and all(is_op(user, "linear") and is_dequantize(argument(user, "x")) for user in node.users)


def _warn_of_rounding(program: Program, node: fx.Node, scales: Tensor) -> None:
    if not torch.equal(scales, scales.bfloat16().float()):
        warnings.warn(
            f"{program.describe(node)}: XNNPACK keeps the scales of groups in bfloat16, so its results differ from those of "
            "the Q/DQ form by up to 0.4 %; ask for such scales from the start, spec.but(scale_bits=8)",
            stacklevel=2,
        )


# -- weights alone -------------------------------------------------------------------------------------------------


def is_linear_alone(node: fx.Node) -> bool:
    return is_op(node, "linear") and _is_alone(node)


def split_bias_add(program: Program, node: fx.Node) -> None:
    """Split a linear into GEMM and bias add: XNNPACK adds no bias to GEMMs of floats by integers. Where XNNPACK does
    not apply, it is a plain matmul, for which ExecuTorch has a fast kernel.
    """
    x, weight, bias = (argument(node, name) for name in ("x", "w", "b"))
    product = _whole_product(program, node, x, weight)
    if product is None:
        return
    if isinstance(bias, fx.Node):
        node.target, node.args, node.kwargs = aten.add.Tensor, (product, bias), {}
    else:
        node.target, node.args, node.kwargs = product.target, product.args, {}
        give_name(node, name_of(product))
        product.graph.erase_node(product)
        return
    give_name(node, "")


def _whole_product(program: Program, node: fx.Node, x: fx.Node, weight: fx.Node) -> fx.Node | None:
    """The product of a linear layer without its bias, by the name of the layer; None where sizes are not known."""
    if is_dequantize(weight):
        product = program.emit(aten.linear.default, (x, weight), before=node, like=node)
        give_name(product, node.name)
        return product
    kind, source = tensor_type(node), tensor_type(x)
    sizes = [size if isinstance(size, int) else -1 for size in kind.shape] if kind is not None else [-1, -1]
    if source is None or sizes.count(-1) > 1:
        return None
    rows = program.emit(aten.reshape.default, (x, [-1, source.shape[-1]]), before=node, like=node)
    turned = program.emit(aten.t.default, (weight,), before=node, like=node)
    product = program.emit(aten.mm.default, (rows, turned), before=node, like=node)
    give_name(product, node.name)
    whole = program.emit(aten.reshape.default, (product, sizes), before=node, like=node)
    give_name(whole, "")
    return whole


def is_conv_alone(node: fx.Node) -> bool:
    return is_op(node, *CONVOLUTIONS) and _is_alone(node)


def in_float(program: Program, node: fx.Node) -> None:
    """Dequantize the weight of a convolution."""
    weight = argument(node, "w")
    whole = _constant(program, weight)
    if whole is not None:
        node.replace_input_with(weight, program.constant(f"{weight.name}_float", whole, before=node))
