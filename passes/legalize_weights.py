"""Legalization of weights that are quantized alone or in groups, for XNNPACK and ExecuTorch's own kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.ir.dialect import argument, is_op, ops_in
from quantc.ir.op_row import Family
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq.ops import is_dequantize
from quantc.qdq.registration import decomposed_ops
from quantc.rewrite.builder import times
from quantc.targets.executorch.lazy_imports import package

aten = torch.ops.aten
GROUP = 32
"""XNNPACK takes groups of this many weights, and multiples."""
NIBBLE = (-8, 7)
MATRIX = 2
"""The axes of a linear layer's weight."""
CONVOLUTIONS = ops_in(Family.CONV, Family.CONV_TRANSPOSE)


class LegalizeWeights(Pass):
    """Write ops whose weight alone is quantized, and weights in groups, as XNNPACK and ExecuTorch have kernels for.

    XNNPACK multiplies floats by linear weights of 8 or 4 bits with a scale for each channel, without a bias, which is
    added afterwards; and integers with run-time scales by groups of 4 bits. Other groups are rows of a matrix, and such
    a layer a plain product, for which ExecuTorch has fast kernels. Weights of convolutions are brought back to float: a
    float convolution in the delegate is many times faster than one outside it. The rows of a quantized embedding are
    looked up as integers; that op comes with ExecuTorch.
    """

    name: ClassVar[str] = "legalize-weights"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        notes = []
        for is_meant, written, what in SPELLINGS:
            found = [node for node in program.nodes() if is_meant(node)]
            count = sum(written(program, node) for node in found)
            notes += [f"{count} {what}"] if count else []
        return Outcome(bool(notes), tuple(notes))


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


def by_rows(program: Program, node: fx.Node) -> bool:
    """Write groups that the delegate does not support as rows of a matrix: ExecuTorch has a kernel for those."""
    parts = [program.tensor(part) if isinstance(part, fx.Node) else None for part in node.args[:3]]
    low, high, dtype, size = node.args[3:7]
    levels, scales, zero_points = parts
    if levels is None or scales is None or zero_points is None or not isinstance(size, int):
        return False
    if _takes_groups(node, zero_points):
        _warn_of_rounding(program, node, scales)
        return False
    hint = str(node.all_input_nodes[0].target)
    rows = (levels.reshape(-1, size), scales.reshape(-1), zero_points.reshape(-1))
    names = (f"{hint}_rows", f"{hint}_row_scales", f"{hint}_row_zero_points")
    made = [program.constant(name, part.contiguous(), before=node) for name, part in zip(names, rows, strict=True)]
    target = decomposed_ops().dequantize_per_channel.default
    kind = TensorType(torch.float32, tuple(rows[0].shape))
    whole = program.emit(target, (*made, 0, low, high, dtype), before=node, like=node, value=kind)
    node.target, node.args, node.kwargs = aten.reshape.default, (whole, list(levels.shape)), {}
    program.touch()
    return True


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


def split_bias_add(program: Program, node: fx.Node) -> bool:
    """Split a linear into GEMM and bias add: XNNPACK adds no bias to GEMMs of floats by integers. Where XNNPACK does
    not apply, it is a plain matmul, for which ExecuTorch has a fast kernel.
    """
    x, weight, bias = (argument(node, name) for name in ("x", "w", "b"))
    if is_dequantize(weight):
        if not isinstance(bias, fx.Node):
            return False
        product = program.emit(aten.linear.default, (x, weight), before=node, like=node)
        program.plan.made_for[product] = node.name
    elif (found := _plain_product(program, node, x, weight)) is not None:
        product = found
    else:
        return False
    program.plan.made_for[node] = ""
    if isinstance(bias, fx.Node):
        node.target, node.args, node.kwargs = aten.add.Tensor, (product, bias), {}
    else:
        node.target, node.args, node.kwargs = product.target, product.args, {}
        program.erase(product)
    program.touch()
    return True


def _plain_product(program: Program, node: fx.Node, x: fx.Node, weight: fx.Node) -> fx.Node | None:
    """The product of a linear layer without its bias, in the shape of the layer; None where sizes are not known."""
    kind, source, inner = tensor_type(node), tensor_type(x), tensor_type(weight)
    if kind is None or source is None or inner is None:
        return None
    sizes = [size if isinstance(size, int) else -1 for size in kind.shape]
    if sizes.count(-1) > 1 or inner.rank != MATRIX:
        return None
    outputs, inputs = inner.shape
    count = times(kind.shape[:-1])
    shapes = {"rows": (count, inputs), "turned": (inputs, outputs), "product": (count, outputs)}
    rows, turned, result = (TensorType(kind.dtype, shape) for shape in shapes.values())
    flat = program.emit(aten.reshape.default, (x, [-1, inputs]), before=node, value=rows)
    other = program.emit(aten.t.default, (weight,), before=node, value=turned)
    product = program.emit(aten.mm.default, (flat, other), before=node, value=result)
    program.plan.made_for[product] = node.name
    whole = program.emit(aten.reshape.default, (product, sizes), before=node, value=kind)
    program.plan.made_for[whole] = ""
    return whole


def is_conv_alone(node: fx.Node) -> bool:
    return is_op(node, *CONVOLUTIONS) and _is_alone(node)


def in_float(program: Program, node: fx.Node) -> bool:
    """Dequantize the weight of a convolution."""
    weight = argument(node, "w")
    whole = _constant(program, weight)
    if whole is None:
        return False
    node.replace_input_with(weight, program.constant(f"{weight.name}_float", whole, before=node))
    return True


# -- tables --------------------------------------------------------------------------------------------------------


def is_lookup(node: fx.Node) -> bool:
    """An embedding whose table is quantized row by row."""
    if not is_op(node, "embedding"):
        return False
    table = argument(node, "w")
    return is_dequantize(table) and "per_channel." in str(table.target) and table.args[3] == 0


def rows_looked_up(program: Program, node: fx.Node) -> bool:
    """Look up rows, and dequantize these alone, by a kernel of ExecuTorch's."""
    package("executorch.exir.passes._quant_patterns_and_replacements")  # registers the op
    levels, scales, zero_points, _, low, high, _ = argument(node, "w").args
    offsets = program.tensor(zero_points)
    given = None
    if offsets is not None and bool(offsets.any()):
        given = program.constant(f"{zero_points.target}_float", offsets.float(), before=node)
    node.args, node.kwargs = (levels, scales, given, low, high, argument(node, "indices")), {}
    node.target = decomposed_ops().embedding_byte.default
    program.touch()
    return True


SPELLINGS: tuple[tuple[Callable[[fx.Node], bool], Callable[[Program, fx.Node], bool], str], ...] = (
    (is_grouped, by_rows, "weights in groups written as rows"),
    (is_linear_alone, split_bias_add, "linear layers written as products, and their biases apart"),
    (is_conv_alone, in_float, "weights of convolutions brought back to float"),
    (is_lookup, rows_looked_up, "embeddings looked up in rows of integers"),
)
"""Rewrites: condition, function, note."""
