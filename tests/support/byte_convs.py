"""Convolutions of bytes as single ops, the x86 kernels that take them, and what these are held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import quantc as qc
from quantc.integer.library import OPS
from quantc.ir.types import type_of_value
from quantc.targets.kernels.int8_conv import CURVES, Conv
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernels_for
from tests.support.programs import Builder

CLOSE = 2e-6
"""How far floats may be off, relative to the largest."""
CONVS: tuple[Any, ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
TRANSPOSED: tuple[Any, ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
MAX_LEVEL = 64
"""Of weights: two products by bytes then fit 16 bits, where processors without VNNI add them."""


@dataclass(frozen=True)
class Layer:
    """A convolution of bytes, as one op."""

    op: str
    shape: tuple[int, ...]
    """That of the weight."""
    window: tuple[Any, ...]
    out: tuple[Any, ...]
    """Zero point, bounds and dtype."""
    x_zero_point: int = 7
    bias: bool = True
    zero_points: int = 0
    """How large those of the weight may be; none if 0."""
    most: int = MAX_LEVEL
    """How large the levels of the weight may be."""
    factor: float = 1e-3
    seed: int = 0

    @property
    def outputs(self) -> int:
        groups = self.window[3]
        return self.shape[1] * groups if self.op == "conv_transpose" else self.shape[0]

    def arguments(self) -> tuple[Any, ...]:
        """What the op takes behind its input."""
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randint(-self.most, self.most + 1, self.shape, generator=generator, dtype=torch.int8)
        transposed = self.op == "conv_transpose"
        scales = self.shape[1] if transposed and self.window[3] == 1 else 1 if transposed else self.shape[0]
        factors = (torch.rand(scales, generator=generator, dtype=torch.float64) + 0.5) * self.factor
        multiplier = factors.reshape(-1, *[1] * (len(self.shape) - 2))
        bias = torch.randint(-3000, 3000, [self.outputs], generator=generator, dtype=torch.int32)
        most, axis = self.zero_points, 1 if transposed else 0
        zeros = torch.randint(-most, most + 1, [self.shape[axis]], generator=generator) if most else None
        layer = (weight, zeros, bias if self.bias else None, *self.window, 1)
        return (self.x_zero_point, *layer, multiplier, None, *self.out)

    def input(self, *shape: int, seed: int = 1) -> Tensor:
        return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)

    def expected(self, x: Tensor) -> Tensor:
        """The result by torch's convolutions in float64, in which sums of bytes are exact."""
        zero_point, weight, zeros, bias, *window, _, multiplier, _, out_zero_point, low, high, dtype = self.arguments()
        axes, is_transposed = len(self.shape) - 2, self.op == "conv_transpose"
        along = [-1, *[1] * axes]
        reals, levels = x.double() - zero_point, weight.double()
        if zeros is not None:
            levels = levels - zeros.reshape(along if is_transposed else [-1, 1, *[1] * axes])
        sums = (TRANSPOSED if is_transposed else CONVS)[axes - 1](reals, levels, None, *window)
        if bias is not None:
            sums = sums + bias.reshape(along)
        real: Tensor = sums * multiplier
        return real.float() if dtype is torch.float32 else (real.round() + out_zero_point).clamp(low, high).to(dtype)

    def call(self, x: Tensor) -> Call:
        """A program with nothing but this op."""
        build = Builder()
        read = build.graph.placeholder("x")
        read.meta["val"] = type_of_value(x)
        given = [
            build.constant(f"constant_{index}", value) if isinstance(value, Tensor) else value
            for index, value in enumerate(self.arguments())
        ]
        made = build.call(OPS[self.op].target, read, *given)
        return Call(build.program(made), made)

    def kernels(self, x: Tensor) -> tuple[list[Kernel], list[str]]:
        """Those that take it, and the reasons of the others."""
        taken: list[Kernel] = []
        reasons: list[str] = []
        for maker in kernels_for("x86")[self.op]:
            try:
                made = maker(self.call(x))
            except NoKernelError as refusal:
                reasons.append(str(refusal))
            else:
                assert isinstance(made, Kernel)
                taken.append(made)
        return taken, reasons

    def check(self, x: Tensor) -> list[str]:
        """All kernels against the op; the families that took it."""
        expected = self.expected(x)
        kernels, _ = self.kernels(x)
        for kernel in kernels:
            close(kernel(x), expected, kernel.name)
            weights = {name: kernel.get_buffer(name) for name in kernel.unpack(kernel._packed)}
            assert all(torch.equal(plain, weights[name]) for name, plain in kernel.unpack(kernel._packed).items())
        return [kernel.family for kernel in kernels]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if not expected.numel():
        return
    apart = float((found.double() - expected.double()).abs().max())
    if expected.dtype.is_floating_point:
        assert apart <= CLOSE * float(expected.abs().max()), what
    else:
        assert apart <= 1, what


FULL, RELU, NARROW = (11, 0, 255, torch.uint8), (11, 11, 255, torch.uint8), (100, 90, 180, torch.uint8)
FLOAT = (0, 0, 0, torch.float32)
ENDINGS = [FULL, RELU, NARROW, FLOAT]
ORDERS = ["in order", "channels last", "every second", "turned"]


def in_memory(x: Tensor, order: str) -> Tensor:
    """The same numbers, lying otherwise in memory."""
    if order == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if order == "every second":
        return torch.stack([x, x], dim=-1)[..., 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if order == "turned" else x


def plain(out: Any = FULL, **more: Any) -> Layer:
    return Layer("conv", (6, 4, 3, 3), ([1, 1], [1, 1], [1, 1], 1), out, **more)


def kernels_in(module: qc.Lowered) -> list[Kernel]:
    return [kernel for kernel in module.modules() if isinstance(kernel, Kernel)]


def is_curved(kernel: Kernel) -> bool:
    """Whether a convolution rounds what a curve makes of its result."""
    return isinstance(kernel, Conv) and kernel.post_op in CURVES.values() and not kernel.ending.is_float
