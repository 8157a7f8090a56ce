"""Convolutions on bytes: onednn's kernels on x86, with the sum and the activation that follow.

onednn's binary sum writes its result over the other summand. That is allowed where nobody reads it later; elsewhere a
copy is handed over.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.integer.library import op_of
from quantc.kernels.ending import Ending
from quantc.kernels.joining import kernels_of
from quantc.kernels.packed import Kernel
from quantc.kernels.table import Call, NoKernelError, Placement, highest_level, kernel
from quantc.program import Program

FORMATS: dict[int, torch.memory_format] = {2: torch.channels_last, 3: torch.channels_last_3d}
"""The order in memory that kernels want, by the number of axes they go over."""


class Conv(Kernel):
    """A convolution of bytes by int8 weights, rounded onto the grid of its result."""

    name: ClassVar[str] = "onednn qconv"
    any_order: ClassVar[bool] = True
    post_ops: ClassVar[dict[int, frozenset[str]]] = {
        1: frozenset({"relu"}),
        2: frozenset({"relu", "hardtanh"}),
        3: frozenset(),
    }
    """What the kernel can do to a result before it is rounded, by the number of axes."""

    def __init__(self, call: Call, ending: Ending) -> None:
        super().__init__()
        weight = call.tensor("w")
        self.register_buffer("weight", weight)
        self.register_buffer("multiplier", ending.by_channel(weight.shape[0]))
        self.register_buffer("bias", ending.bias(call["bias"]))
        self.ending = ending
        self.x_zero_point: int = call["x_zero_point"]
        self.highest = highest_level(call.node.args[0])
        self.window = (list(call["stride"]), list(call["padding"]), list(call["dilation"]), call["groups"])
        self.axes = len(self.window[0])
        self.post_op, self.bounds = _post_op(ending, self.post_ops[self.axes])

    @property
    def pair_sums(self) -> tuple[Tensor, int]:
        return self.get_buffer("weight"), self.highest

    def pack(self) -> Any:
        weight, multiplier = self.get_buffer("weight"), self.get_buffer("multiplier")
        packed = torch.ops.onednn.qconv_prepack(weight, multiplier, 1.0, self.x_zero_point, *self.window, None)
        return packed, multiplier, torch.zeros(1, dtype=torch.int32), self.bias

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        weight, multiplier, zeros, bias = packed
        ending = self.ending
        made = torch.ops.onednn.qconv_pointwise(
            _laid_out(inputs[0], self.axes),
            1.0,
            self.x_zero_point,
            weight,
            multiplier,
            zeros,
            bias,
            *self.window,
            1.0,
            ending.zero_point,
            ending.dtype,
            self.post_op,
            self.bounds,
            "",
        )
        return self._finished(made)

    def _finished(self, made: Tensor) -> Tensor:
        """Bounds that the kernel did not put on, and the order in memory that readers want."""
        ending = self.ending
        if self.post_op == "none" and ending.cuts:
            made.clamp_(ending.low, ending.high)
        return made.contiguous() if self.in_order else made


class ConvSum(Conv):
    """A convolution to which another tensor of bytes is added before anything is rounded."""

    name: ClassVar[str] = "onednn qconv + sum"
    post_ops: ClassVar[dict[int, frozenset[str]]] = {2: frozenset({"relu"})}

    def __init__(self, call: Call, ending: Ending, scale: float, zero_point: int) -> None:
        super().__init__(call, ending)
        self.summand = (scale, zero_point)
        self.keep = True
        """Whether the summand must not be written over; see `settle_summands`."""

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        weight, multiplier, zeros, bias = packed
        x, other = inputs
        other = _laid_out(other, self.axes)
        if self.keep and other.data_ptr() == inputs[1].data_ptr():
            other = other.clone()
        ending = self.ending
        made = torch.ops.onednn.qconv2d_pointwise.binary(
            _laid_out(x, self.axes),
            1.0,
            self.x_zero_point,
            weight,
            multiplier,
            zeros,
            other,
            bias,
            *self.window,
            1.0,
            ending.zero_point,
            ending.dtype,
            *self.summand,
            "sum",
            1.0,
            self.post_op,
            self.bounds,
            "",
        )
        return self._finished(made)


def _laid_out(x: Tensor, axes: int) -> Tensor:
    return x.contiguous(memory_format=FORMATS[axes]) if axes in FORMATS else x.contiguous()


def _post_op(ending: Ending, known: frozenset[str]) -> tuple[str, list[float]]:
    """What onednn does before it rounds; nothing where the bounds are put on afterwards."""
    if ending.is_relu and "relu" in known:
        return "relu", []
    if ending.cuts and "hardtanh" in known:
        return "hardtanh", [float(ending.low - ending.zero_point), float(ending.high - ending.zero_point)]
    return "none", []


def _check(call: Call) -> None:
    x = call.node.args[0]
    kind = x.meta.get("val") if isinstance(x, fx.Node) else None
    if kind is None or kind.dtype is not torch.uint8:
        raise NoKernelError("onednn convolves uint8")
    weight = call.tensor("w")
    if weight.dtype is not torch.int8 or call["w_zero_point"] is not None:
        raise NoKernelError("onednn takes symmetric int8 weights")
    if kind.rank != weight.dim():
        raise NoKernelError("onednn convolves batches")


@kernel("x86", "conv")
def conv(call: Call) -> Kernel:
    _check(call)
    return Conv(call, Ending.of(call))


@kernel("x86", "sum")
def conv_sum(call: Call) -> Placement:
    """A sum of an accumulator and a tensor of bytes, together with the convolution that made the accumulator."""
    terms: Any = call.node.args[0]
    if len(terms) != 2 or call["offset"] is not None:
        raise NoKernelError("it is not the sum of a convolution and one tensor")
    made = next((node for node in terms if _is_accumulator(node)), None)
    if made is None or len(made.users) != 1:
        raise NoKernelError("no summand is the accumulator of a convolution that nobody else reads")
    at = list(terms).index(made)
    other: fx.Node = terms[1 - at]
    inner = Call(call.program, made)
    _check(inner)
    kinds = [node.meta.get("val") for node in (call.node, other)]
    if len(inner["stride"]) != 2 or kinds[1] is None or kinds[1].dtype is not torch.uint8:
        raise NoKernelError("onednn adds uint8 to convolutions over two axes alone")
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
    return Placement(built, (source, other))


def _is_accumulator(node: fx.Node) -> bool:
    op = op_of(node.target)
    return op is not None and op.name == "conv" and node.args[-1] is torch.int32


def settle_summands(program: Program) -> None:
    """Let sums write over their summand where nobody can tell.

    To be called when all kernels are in their places, since a sum reads what its convolution read at its own place. The
    summand must be memory of its own, made by a kernel; everybody else who reads it must come before, and must be a
    kernel too, which keeps no view of it; and it must not be what is convolved.
    """
    for _, graph in program.graphs():
        order = {node: position for position, node in enumerate(graph.nodes)}
        makers = dict(kernels_of(program, graph))
        for node, maker in makers.items():
            if isinstance(maker, ConvSum):
                source, other = node.args
                readers: list[fx.Node] = list(other.users) if isinstance(other, fx.Node) else []
                maker.keep = (
                    other is source
                    or other not in makers
                    or not all(reader in makers and order[reader] <= order[node] for reader in readers)
                )
