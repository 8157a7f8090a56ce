"""Int8 convolutions: onednn's kernels on x86, with fused residual add and activation epilogues.

onednn's binary sum writes its result over the other summand. That is allowed if this is the summand's last use;
otherwise it gets a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx

from quantc.integer.library import op_of
from quantc.ir.dialect import op_name
from quantc.ir.program import attribute
from quantc.targets.kernels.conv_window import FORMATS, shape_to_pack_for
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_conv_base import ByteConv, check_bytes, symmetric
from quantc.targets.kernels.kernel import Kernel, KernelForm
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernel, larger_kernel

CONV: Any = torch.ops.onednn.qconv_pointwise.default
CONV_SUM: Any = torch.ops.onednn.qconv2d_pointwise.binary
CURVES = {"hardswish": "hardswish", "silu": "swish"}
"""Activations that onednn does before it rounds, on real numbers, by their names in the dialect."""


class Conv(ByteConv):
    """Convolution of uint8 by int8 weights, on onednn."""

    name: ClassVar[str] = "onednn qconv"
    family: ClassVar[str] = "onednn"
    post_ops: ClassVar[dict[int, frozenset[str]]] = {
        2: frozenset({"relu", "hardtanh", *CURVES.values()}),
        3: frozenset(),
    }
    """Post-ops that the kernel applies before it rounds, by the number of spatial axes."""

    def __init__(self, call: Call, ending: Ending) -> None:
        super().__init__(call, ending)
        self.check_onednn(call)
        self.known = self.post_ops[self.window.wide.axes]
        self.post_op, self.bounds = _post_op(ending, self.known)

    def pack(self) -> Any:
        return self._pack_for(None)

    def pack_for(self, *inputs: Tensor) -> Any:
        """Packed weight for inputs of this shape. Without a shape onednn guesses; a wrong guess repacks the weight at
        every call, which takes up to twice as long as the call itself.
        """
        return self._pack_for(shape_to_pack_for(self.window, self.rows().shape, inputs[0]))

    def _pack_for(self, shape: list[int] | None) -> Any:
        multiplier, window = self.get_buffer("multiplier"), self.window.wide.arguments
        packed = torch.ops.onednn.qconv_prepack(self.rows(), multiplier, 1.0, self.x_zero_point, *window, shape)
        zeros, bias = torch.zeros(1, dtype=torch.int32), self.optional_buffer("bias")
        return 1.0, self.x_zero_point, packed, multiplier, zeros, bias, window

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": self.plain(packed[2].to_dense())}

    def convolved(self, packed: Any, *images: Tensor) -> Tensor:
        scale, zero_point, weight, multiplier, zeros, bias, window = packed
        ending = self.ending
        made: Tensor = CONV(
            *images, scale, zero_point, weight, multiplier, zeros, bias, *window,
            ending.scale, ending.zero_point, ending.dtype, self.post_op, self.bounds, "",
        )  # fmt: skip
        return made

    def bound_convolution(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Tensor]:
        scale, zero_point, weight, multiplier, zeros, bias, window = packed
        ending = self.ending
        settings = (
            scale, zero_point, weight, multiplier, zeros, bias, *window,
            ending.scale, ending.zero_point, ending.dtype, self.post_op, self.bounds, "",
        )  # fmt: skip
        return lambda x: CONV(x, *settings)

    def absorb(self, op: str) -> bool:
        """Fuse the activation of a float result."""
        post_op = {**CURVES, "relu": "relu"}.get(op, "")
        if not self.ending.is_float or self.post_op != "none" or post_op not in self.known:
            return False
        self.post_op = post_op
        return True

    def rounded_after(self, curve: str, ending: Ending) -> Self:
        """The same convolution with an activation and the requantization of its result fused."""
        made = copy.copy(self)
        made.ending, made.post_op, made.bounds = ending, curve, []
        return made


class ConvSum(Conv):
    """Convolution with a residual add of an 8-bit tensor before rounding."""

    name: ClassVar[str] = "onednn qconv + sum"
    post_ops: ClassVar[dict[int, frozenset[str]]] = {2: frozenset({"relu"})}

    def __init__(self, call: Call, ending: Ending, scale: float, zero_point: int) -> None:
        super().__init__(call, ending)
        self.summand = (scale, zero_point)
        self.keep = True
        """False if the kernel may overwrite the summand; `overwrite-summands` sets it."""

    @property
    def written_over(self) -> int | None:
        return None if self.keep else 1

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, other = inputs
        return super().run(packed, x, other.clone() if self.keep else other)

    def convolved(self, packed: Any, *images: Tensor) -> Tensor:
        scale, zero_point, weight, multiplier, zeros, bias, window = packed
        x, other = images
        ending = self.ending
        made: Tensor = CONV_SUM(
            x, scale, zero_point, weight, multiplier, zeros, other, bias, *window,
            ending.scale, ending.zero_point, ending.dtype, *self.summand, "sum", 1.0, self.post_op, self.bounds, "",
        )  # fmt: skip
        return made

    def bound_convolution(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Tensor]:
        scale, zero_point, weight, multiplier, zeros, bias, window = packed
        ending, keep, order = self.ending, self.keep, FORMATS[self.window.axes]
        before = (scale, zero_point, weight, multiplier, zeros)
        after = (
            bias, *window, ending.scale, ending.zero_point, ending.dtype, *self.summand, "sum", 1.0,
            self.post_op, self.bounds, "",
        )  # fmt: skip

        def convolve(x: Tensor, other: Tensor) -> Tensor:
            summand = other.clone() if keep else other
            made: Tensor = CONV_SUM(x, *before, summand.contiguous(memory_format=order), *after)
            return made

        return convolve


def _post_op(ending: Ending, known: frozenset[str]) -> tuple[str, list[float]]:
    """The onednn post-op of an epilogue; "none" where bounds are applied afterwards."""
    if ending.is_relu and "relu" in known:
        return "relu", []
    if ending.cuts and "hardtanh" in known:
        return "hardtanh", [float(ending.low - ending.zero_point), float(ending.high - ending.zero_point)]
    return "none", []


@kernel("x86", "conv")
def conv(call: Call) -> Kernel:
    check_bytes(call, "onednn")
    return symmetric(Conv(call, Ending.of(call)), "onednn")


@larger_kernel("x86", "sum")
def conv_sum(call: Call) -> Placement:
    """Fused conv and residual add: an add of an accumulator and an 8-bit tensor, with the convolution that made the accumulator."""
    terms: Any = call.node.args[0]
    if len(terms) != 2 or call["offset"] is not None:
        raise NoKernelError("it is not the sum of a convolution and one tensor")
    made = next((node for node in terms if _is_accumulator(node)), None)
    if made is None or len(made.users) != 1:
        raise NoKernelError("no summand is the accumulator of a convolution with no other reader")
    at = list(terms).index(made)
    other: fx.Node = terms[1 - at]
    inner = Call(call.program, made)
    check_bytes(inner, "onednn")
    kinds = [node.meta.get("val") for node in (call.node, other)]
    if len(inner["stride"]) > 2 or kinds[1] is None or kinds[1].dtype is not torch.uint8:
        raise NoKernelError("onednn adds uint8 to convolutions over one axis or two alone")
    if call["dtype"] is not torch.uint8 or kinds[0] is None or kinds[0].shape != kinds[1].shape:
        raise NoKernelError("the summand is broadcast, or the result is not uint8")
    multipliers: Any = call.node.args[2]
    factors = [call.program.tensor(node) for node in multipliers]
    ours, theirs = factors[at], factors[1 - at]
    zeros: Any = call["zero_points"]
    if ours is None or theirs is None or theirs.numel() != 1 or zeros[at] != 0:
        raise NoKernelError("the summand has a scale for each channel")
    ending = Ending.of(call, ours)
    source: Any = made.args[0]
    built = ConvSum(inner, ending, float(theirs), zeros[1 - at])
    return Placement(symmetric(built, "onednn"), (source, other))


def _is_accumulator(node: fx.Node) -> bool:
    op = op_of(node.target)
    return op is not None and op.name == "conv" and node.args[-1] is torch.int32


@larger_kernel("x86", "quantized_decomposed.quantize_per_tensor.default")
def conv_curve(call: Call) -> Placement:
    """Fused conv, activation and quantize."""
    activation, scale, zero_point, low, high, dtype = call.node.args
    curve = CURVES.get(op_name(activation), "") if isinstance(activation, fx.Node) else ""
    if not isinstance(activation, fx.Node) or not curve:
        raise NoKernelError("it does not round an activation that onednn's convolutions do")
    source: Any = activation.args[0]
    found = attribute(call.program.owner(source.graph), str(source.target)) if source.op == "call_module" else None
    if not isinstance(found, Conv) or not found.ending.is_float or curve not in found.known:
        raise NoKernelError("its activation is not that of a convolution over one axis or two on onednn")
    if len(activation.users) != 1 or len(source.users) != 1 or found.post_op != "none":
        raise NoKernelError("others read what is between the convolution and its rounding")
    ending = Ending(found.ending.multiplier, zero_point, low, high, dtype, scale)  # type: ignore[arg-type]
    return Placement(found.rounded_after(curve, ending), tuple(source.all_input_nodes))
