"""Engine-independent base of int8 convolution kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, fx

from quantc.targets.kernels.conv_window import ADDED, FORMATS, Window
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel import Kernel, KernelForm, Work
from quantc.targets.kernels.kernel_table import Call, NoKernelError, highest_level
from quantc.targets.kernels.saturation import adds_in_16_bits, can_saturate


class ByteConv(Kernel):
    """Convolution of uint8 by int8 weights, requantized.

    A conv1d runs as a conv2d with a leading axis of size 1. Single items become batches of one.
    """

    any_order: ClassVar[bool] = True
    bounded_by: ClassVar[frozenset[str]] = frozenset({"relu", "hardtanh"})
    """The post-ops that keep levels within the bounds of the result."""

    outputs_axis: ClassVar[int] = 0
    """The axis of the outputs in the weight."""

    def __init__(self, call: Call, ending: Ending) -> None:
        super().__init__()
        weight, zeros = call.tensor("w"), call["w_zero_point"]
        self.register_buffer("weight", weight)
        behind = [1] * (weight.dim() - 1 - self.outputs_axis)
        self.register_buffer("zero_points", None if zeros is None else zeros.reshape(-1, *behind).to(torch.int16))
        self.is_centered = zeros is None or _fits(weight - self.get_buffer("zero_points"))
        """True if the weight's levels less their zero points fit in bytes: the kernel then multiplies those."""
        self.shape = tuple(weight.shape)
        """Shape of the weight, which is dropped when it is packed."""
        self.window = self._window(call)
        self.register_buffer("multiplier", self._by_output(ending.multiplier))
        bias = ending.bias(call["bias"])
        self.register_buffer("bias", None if bias is None else self._by_output(bias))
        self.ending = ending
        self.x_zero_point: int = call["x_zero_point"]
        self.highest = highest_level(call.program, call.node.args[0])
        self.post_op, self.bounds = "none", list[float]()

    def _window(self, call: Call) -> Window:
        return Window.of(call, len(self.shape) - 2)

    def _by_output(self, values: Tensor) -> Tensor:
        """Numbers for all outputs, or for each, as one for each output of the kernel."""
        return values.expand(self.shape[0]).contiguous()

    # -- weights ---------------------------------------------------------------------------------------------------

    def levels(self) -> Tensor:
        """Int8 weight that is multiplied, in the weight's own shape."""
        plain = self.plain_buffers()
        if "zero_points" not in plain or not self.is_centered:
            return plain["weight"]
        return (plain["weight"] - plain["zero_points"]).to(torch.int8)

    def rows(self) -> Tensor:
        """The levels as `[outputs, inputs per group, *taps]`, over two or three spatial axes."""
        return two_axes(self.levels())

    def levels_of(self, rows: Tensor) -> Tensor:
        """Inverse of `rows`."""
        return rows.reshape(self.shape)

    def plain(self, rows: Tensor) -> Tensor:
        """The original weight."""
        levels, zeros = self.levels_of(rows), self.optional_buffer("zero_points")
        return levels if zeros is None or not self.is_centered else (levels + zeros).to(torch.int8)

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        return self.rows(), self.highest

    def check_pairs(self) -> None:
        """Refuse recentred weights, which `convert` has not checked, if 16-bit pair sums may saturate on this processor."""
        if adds_in_16_bits() and can_saturate(self):
            raise NoKernelError(
                "sums of two products may be cut off on this processor, with its weights as kernels need them"
            )

    def check_onednn(self, call: Call) -> None:
        """Refuse windows that onednn computes wrongly."""
        rows = self.rows().shape
        self.window.check_onednn(call.node.args[0], rows[-self.window.axes :], rows[1])

    def check_reach(self, bits: int) -> None:
        """Refuse sums that may overflow an integer of `bits` bits in steps of the result: kernels that round before
        they clamp turn these into the lowest level.
        """
        zero, bias = self.x_zero_point, self.optional_buffer("bias")
        most = torch.iinfo(torch.uint8).max
        sums = self.centered_rows().abs().flatten(1).sum(dim=1).double() * max(zero, most - zero)
        steps = sums * self.get_buffer("multiplier") + (0 if bias is None else bias.abs())
        if float(steps.max()) >= 2.0 ** (bits - 1):
            raise NoKernelError(f"its sums may exceed the range of its result so far that {bits} bits do not hold them")

    def centered_rows(self) -> Tensor:
        """Weight minus zero point, in int16."""
        return self.rows().to(torch.int16)

    def work(self, *inputs: Tensor) -> Work | None:
        return self.window.work(inputs[0].shape, self.shape)

    # -- running ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def convolved(self, packed: Any, *images: Tensor) -> Tensor:
        """Result for a batch in the kernel's memory format."""

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, window = inputs[0], self.window
        if x.dim() != window.axes + 2:
            window.check(x, self.name)
            return self.run(packed, *(item.unsqueeze(0) for item in inputs)).squeeze(0)
        if not x.numel():
            return self.of_nothing(x)
        made = self.finished(window.like_input(self.convolved(packed, *map(window.images, inputs))))
        return made.contiguous() if self.in_order else made

    @property
    def makes_memory(self) -> bool:
        return self.ending.is_float

    def bound(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Any]:
        window, rank = self.window, self.window.axes + 2
        if window.axes == 1:
            return super().bound(packed, reads, yields)
        convolve = self.bound_convolution(packed, reads, yields)
        order = FORMATS[window.axes]

        def step(x: Tensor, *rest: Tensor) -> Any:
            if x.dim() != rank or not x.numel():
                return self.run(packed, x, *rest)
            made = self.finished(convolve(x.contiguous(memory_format=order), *rest))
            return made.contiguous() if self.in_order else made

        return step

    def bound_convolution(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Tensor]:
        """`convolved`, bound to the packed weight; its first tensor is already in the kernel's memory format."""
        images = self.window.images
        return lambda x, *rest: self.convolved(packed, x, *map(images, rest))

    def of_nothing(self, x: Tensor) -> Tensor:
        """Result for an empty batch."""
        return self.window.empty(x, self.shape, self.ending.dtype)

    def finished(self, made: Tensor) -> Tensor:
        """Apply the clamp that the kernel itself did not."""
        ending = self.ending
        if ending.cuts and self.post_op not in self.bounded_by:
            made.clamp_(ending.low, ending.high)
        return made

    def extra_repr(self) -> str:
        return self.name if self.post_op in ("none", *self.bounded_by) else f"{self.name}, {self.post_op}"


def two_axes(weight: Tensor) -> Tensor:
    """A conv1d weight as a conv2d weight."""
    return weight.unsqueeze(ADDED) if weight.dim() == 3 else weight


def check_bytes(call: Call, engine: str) -> None:
    """Refuse operands that an engine does not convolve, whatever the weight's zero points."""
    x = call.node.args[0]
    kind = x.meta.get("val") if isinstance(x, fx.Node) else None
    if kind is None or kind.dtype is not torch.uint8:
        raise NoKernelError(f"{engine} convolves uint8")
    weight = call.tensor("w")
    if weight.dtype is not torch.int8:
        raise NoKernelError(f"{engine} takes weights of int8, not {weight.dtype}")
    if not weight.numel():
        raise NoKernelError("its weight is empty")
    bias = call["bias"]
    if bias is not None and not isinstance(bias, Tensor):
        raise NoKernelError("its bias is not a constant")


def _fits(numbers: Tensor) -> bool:
    """True if integers fit int8."""
    limits = torch.iinfo(torch.int8)
    return limits.min <= int(numbers.min()) and int(numbers.max()) <= limits.max


Built = TypeVar("Built", bound=ByteConv)


def symmetric(kernel: Built, engine: str) -> Built:
    """The kernel, if its weights can be made symmetric in int8."""
    if not kernel.is_centered:
        raise NoKernelError(f"{engine} takes symmetric weights, and with its zero points these need more than 8 bits")
    if kernel.optional_buffer("zero_points") is not None:
        kernel.check_pairs()
    return kernel
