"""Fused kernels for linear, activation and quantize.

onednn applies some activations as it writes results, in real units: with the true scales. Values between GEMM and
quantize are float32, as in the unfused ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.dialect import argument, op_name, traits_of
from quantc.ir.op_row import Trait
from quantc.ir.program import attribute
from quantc.targets.kernels.int8_linear import Activation, Linear, OnFbgemm, OnOnednn
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, larger_kernel

QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
ALGORITHM = "none"
"""The argument for onednn where an activation has only one algorithm."""


@dataclass(frozen=True)
class PostOp:
    """An activation as a post-op of onednn's linear kernel."""

    name: str
    scalars: tuple[str, ...] = ()
    """The arguments of the op that it reads, all of them numbers."""
    algorithm: str = ""
    """The argument of the op that names its algorithm."""


POST_OPS: dict[str, PostOp] = {
    "relu": PostOp("relu"),
    "clamp": PostOp("hardtanh", ("min", "max")),
    "gelu": PostOp("gelu", (), "approximate"),
    "leaky_relu": PostOp("leaky_relu", ("negative_slope",)),
    "tanh": PostOp("tanh"),
    "silu": PostOp("swish"),
    "hardswish": PostOp("hardswish"),
}
"""By op of the dialect: what the kernel takes, and computes to within 1e-6 of the largest result."""
APART = PostOp("")
"""Any other function of one number: it is computed on the float results, and rounded."""


def fused_linear(call: Call, family: type[Linear]) -> Placement:
    """Linear layer with its activation and the quantize of a call, fused."""
    reals, scale, zero_point, low, high, dtype = call.node.args
    if not isinstance(reals, fx.Node) or dtype is not torch.uint8 or len(reals.users) > 1:
        raise NoKernelError("what is rounded is read by others too, or not rounded to uint8")
    post_op = POST_OPS.get(op_name(reals), APART)
    before = reals.all_input_nodes
    is_function = Trait.ELEMENTWISE in traits_of(reals) and Trait.MODAL not in traits_of(reals)
    if not is_function or len(before) != 1 or len(before[0].users) > 1 or before[0].op != "call_module":
        raise NoKernelError("what is rounded is not an activation of a linear layer alone")
    layer = attribute(call.program.owner(reals.graph), str(before[0].target))
    if not isinstance(layer, Linear) or not layer.ending.is_float or layer.activation is not None:
        raise NoKernelError("what is rounded is not an activation of a linear layer")
    numbers = [argument(reals, name) for name in post_op.scalars]
    if not all(isinstance(number, int | float) for number in numbers):
        raise NoKernelError("a bound of the activation is not a number")
    scalars = tuple(float(number) for number in numbers)
    algorithm = argument(reals, post_op.algorithm) if post_op.algorithm else ALGORITHM
    function = _function(reals)
    numbers_of_grid: Any = (scale, zero_point, low, high)
    after = Activation(op_name(reals), post_op.name, scalars, algorithm, function, *numbers_of_grid)
    made: Kernel = family(layer.plain, layer.reading, layer.ending, after)
    return Placement(made, tuple(before[0].args))  # type: ignore[arg-type]


def _function(node: fx.Node) -> Callable[[Tensor], Tensor]:
    """An op of one tensor, with its other arguments as they are."""
    target: Any = node.target
    rest, named = node.args[1:], dict(node.kwargs)
    return lambda x: target(x, *rest, **named)


@larger_kernel("x86", QUANTIZE)
def fbgemm(call: Call) -> Placement:
    return fused_linear(call, OnFbgemm)


@larger_kernel("x86", QUANTIZE)
def onednn(call: Call) -> Placement:
    return fused_linear(call, OnOnednn)
