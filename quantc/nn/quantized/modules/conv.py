"""Quantized convolutions. Adding one more takes one more line."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import nn
from torch.nn import functional

from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.weighted_module import Weighted

SETTINGS = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
    "padding_mode",
)


class _ConvNd(Weighted):
    """A convolution over one axis, two or three."""

    settings: ClassVar[tuple[str, ...]] = SETTINGS
    op: ClassVar[str] = "conv"
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    padding_mode: str

    @classmethod
    def _like(cls, source: nn.Module, has_bias: bool) -> Self:
        taken = [name for name in SETTINGS if name != "transposed" and (cls.axis == 1 or name != "output_padding")]
        return cls(**{name: getattr(source, name) for name in taken}, bias=has_bias)

    def ready(self, x: QuantizedTensor) -> QuantizedTensor:
        """With what lies beyond the edges, where that is not as many zeros on both sides."""
        around = self._around()
        if around is None:
            return x
        if self.padding_mode == "zeros":
            return x.like(functional.pad(x.data_of, around, value=int(x.zero_point_of)))
        # torch pads floats alone in these ways, and every byte is one of them
        padded = functional.pad(x.data_of.float(), around, mode=self.padding_mode)
        return x.like(padded.to(x.dtype))

    def _around(self) -> list[int] | None:
        if self.padding_mode == "zeros" and self.padding != "same":
            return None
        if self.padding == "valid":
            return None
        if self.padding == "same":
            whole = [gap * (size - 1) for gap, size in zip(self.dilation, self.kernel_size, strict=True)]
            pairs = [(total // 2, total - total // 2) for total in whole]
        else:
            pairs = [(int(size), int(size)) for size in self.padding]
        return [size for pair in reversed(pairs) for size in pair]

    def window(self) -> tuple[tuple[str, Any], ...]:
        inside = isinstance(self.padding, str) or self._around() is not None
        padding = [0] * len(self.kernel_size) if inside else [int(size) for size in self.padding]
        return (
            ("stride", list(self.stride)),
            ("padding", padding),
            ("dilation", list(self.dilation)),
            ("groups", self.groups),
        )

    def extra_repr(self) -> str:
        plain: dict[str, Any] = {
            "padding": (0,) * len(self.kernel_size),
            "dilation": (1,) * len(self.kernel_size),
            "output_padding": (0,) * len(self.kernel_size),
            "groups": 1,
            "padding_mode": "zeros",
        }
        others = [f"{name}={getattr(self, name)}" for name, value in plain.items() if getattr(self, name) != value]
        shape = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        without = [] if self.bias() is not None else ["bias=False"]
        return ", ".join([shape, *others, *without, self.grid_text(), f"qscheme={self.weight().qscheme()}"])


class _ConvTransposeNd(_ConvNd):
    """A transposed one."""

    op: ClassVar[str] = "conv_transpose"
    axis: ClassVar[int] = 1

    def window(self) -> tuple[tuple[str, Any], ...]:
        stride, padding, dilation, groups = super().window()
        return stride, padding, ("output_padding", list(self.output_padding)), groups, dilation


class Conv1d(_ConvNd, of=nn.Conv1d): ...


class Conv2d(_ConvNd, of=nn.Conv2d): ...


class Conv3d(_ConvNd, of=nn.Conv3d): ...


class ConvTranspose1d(_ConvTransposeNd, of=nn.ConvTranspose1d): ...


class ConvTranspose2d(_ConvTransposeNd, of=nn.ConvTranspose2d): ...


class ConvTranspose3d(_ConvTransposeNd, of=nn.ConvTranspose3d): ...


__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
