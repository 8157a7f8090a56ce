"""Dynamically quantized convolutions."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.nn.dynamic_module import run_time_grid
from quantc.nn.kernel_ops import Run, on_kernel, target
from quantc.nn.observed_weights import WEIGHT_DTYPES, check_weight_dtype, observed_weight
from quantc.nn.quantized.modules.conv import _ConvNd, _ConvTransposeNd
from quantc.nn.quantized_tensor import refuse_quantized


class _RunTimeConv(_ConvNd):
    """To be put before a quantized convolution: one that reads and yields floats."""

    has_grid: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        refuse_quantized(input, type(self).__name__)
        around = self._around()
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        x = input if around is None else functional.pad(input, around, mode=mode)
        kind = target()
        made: Tensor = self.kernels.made((kind, x.dim()), lambda: self._run_time_kernel(kind, x))(x.to(torch.float32))
        return made if made.dtype is input.dtype else made.to(input.dtype)

    def _run_time_kernel(self, kind: str, x: Tensor) -> Run:
        zeros = self.tensor("weight_zero_point")
        arguments = {
            "w": self.tensor("weight"),
            "w_zero_point": zeros.to(torch.int32) if bool(zeros.any()) else None,
            "w_scale": self.tensor("weight_scale").float(),
            "bias": self.bias(),
            **dict(self.window()),
            **run_time_grid(kind),
            "parts": 0,
        }
        return on_kernel(kind, f"{self.op}_dynamic", [x.to(torch.float32)], arguments)

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        source, weight, bias, observer = cls.parts_of(mod)
        check_weight_dtype(observer, WEIGHT_DTYPES, cls.__name__)
        made = cls._like(source, bias is not None)
        made.set_weight_bias(observed_weight(weight, observer), bias)
        return made

    def grid_text(self) -> str:
        return "dynamic"

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"


class Conv1d(_RunTimeConv, of=nn.Conv1d): ...


class Conv2d(_RunTimeConv, of=nn.Conv2d): ...


class Conv3d(_RunTimeConv, of=nn.Conv3d): ...


class ConvTranspose1d(_RunTimeConv, _ConvTransposeNd, of=nn.ConvTranspose1d): ...


class ConvTranspose2d(_RunTimeConv, _ConvTransposeNd, of=nn.ConvTranspose2d): ...


class ConvTranspose3d(_RunTimeConv, _ConvTransposeNd, of=nn.ConvTranspose3d): ...


__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
