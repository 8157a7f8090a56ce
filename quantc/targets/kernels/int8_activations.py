"""Lookup tables for unary functions between 8-bit tensors, in place of dequantize, float32 op and quantize.

Activations that no kernel fuses as an epilogue stay float, though their input and output may be 8-bit. 8 bits have 256
values: the result for each is computed once, by the ops themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from quantc.ir.dialect import traits_of
from quantc.ir.op_row import Trait
from quantc.ir.program import attribute
from quantc.ir.types import dtype_of
from quantc.targets.kernels.int8_elementwise import BYTES, Dequantize
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, larger_kernel
from quantc.targets.kernels.qnnpack_activations import ByteTranslation

QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"


@larger_kernel("x86", QUANTIZE)
def looked_up(call: Call) -> Placement:
    """Lookup table for a chain of dequantize, unary elementwise ops and quantize."""
    chain, first = functions_before(call.node)
    if first is None or first.op != "call_module":
        raise NoKernelError("what is rounded is no function of bytes")
    before = attribute(call.program.owner(first.graph), str(first.target))
    source: Any = first.args[0]
    dtype = dtype_of(source)
    if not isinstance(before, Dequantize) or dtype not in BYTES or call.node.args[5] not in BYTES:
        raise NoKernelError("what is rounded is no function of bytes")
    limits = torch.iinfo(dtype)
    entries: Tensor = before(torch.arange(limits.min, limits.max + 1).to(dtype))
    for node in [*chain, call.node]:
        entries = _apply(node, entries)
    return Placement(ByteTranslation(entries, dtype), (source,))


def functions_before(node: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """Single-use unary elementwise ops before a node, and the node that they read."""
    chain: list[fx.Node] = []
    at = node.all_input_nodes[0]
    while Trait.ELEMENTWISE in traits_of(at) and Trait.MODAL not in traits_of(at):
        if len(at.all_input_nodes) != 1 or len(at.users) != 1:
            return chain, None
        chain.insert(0, at)
        at = at.all_input_nodes[0]
    return chain, at


def _apply(node: fx.Node, x: Tensor) -> Tensor:
    """Result of a node's op on another tensor than its input."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: x)
    made: Tensor = target(*args, **kwargs)
    return made
