"""Quantized activations: a row each, of the function of floats and the settings it takes."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.nn import functional_ops
from quantc.nn.observed_weights import quantize_weight
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor, check_quantized, quantize_per_tensor
from quantc.spec.torch_dtypes import PER_CHANNEL


class ReLU(nn.ReLU):
    """Numbers from zero on: it works on quantized tensors alone, and keeps their grid."""

    low: ClassVar[float] = 0.0
    high: ClassVar[float | None] = None

    def forward(self, input: Tensor) -> QuantizedTensor:  # noqa: A002 - torch's name
        clamp = functional_ops.clamp_levels_ if self.inplace else functional_ops.clamp_levels
        return clamp(input, self.low, self.high, type(self).__name__)

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        return cls(mod.inplace)


class ReLU6(ReLU):
    """Numbers from zero to six."""

    high: ClassVar[float | None] = 6.0


class Curve(QuantizedModule):
    """A function of one number; `settings` are its other arguments with their defaults."""

    function: ClassVar[functional_ops.Function]
    settings: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, of: type[nn.Module], function: functional_ops.Function, **settings: Any) -> None:
        super().__init_subclass__()
        cls._FLOAT_MODULE, cls.function, cls.settings = of, function, settings

    def __init__(self, scale: float = 1.0, zero_point: int = 0, *values: Any, **named: Any) -> None:
        super().__init__()
        self.scale = float(named.pop("output_scale", scale))
        self.zero_point = int(named.pop("output_zero_point", zero_point))
        given = dict(zip(self.settings, values, strict=False))
        for name, value in {**self.settings, **given, **named}.items():
            setattr(self, name, value)

    def forward(self, input: Tensor) -> QuantizedTensor:  # noqa: A002
        x = self.quantized_input(input)
        values = [getattr(self, name) for name in self.settings]
        return functional_ops.pointwise(type(self).function, x, *values, grid=self.grid)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        made = cls(1.0, 0, **{name: getattr(mod, name) for name in cls.settings})
        made.put_on_grid(getattr(mod, "activation_post_process", None))
        return made

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> Self:
        return cls(float(scale), int(zero_point), **{name: getattr(mod, name) for name in cls.settings})

    def extra_repr(self) -> str:
        return ", ".join([*(f"{name}={getattr(self, name)}" for name in self.settings), self.grid_text()])


class Hardswish(Curve, of=nn.Hardswish, function=functional.hardswish): ...


class ELU(Curve, of=nn.ELU, function=functional.elu, alpha=1.0): ...


class CELU(Curve, of=nn.CELU, function=functional.celu, alpha=1.0): ...


class LeakyReLU(Curve, of=nn.LeakyReLU, function=functional.leaky_relu, negative_slope=1e-2): ...


class Sigmoid(Curve, of=nn.Sigmoid, function=torch.sigmoid): ...


class Tanh(Curve, of=nn.Tanh, function=torch.tanh): ...


class GELU(Curve, of=nn.GELU, function=functional.gelu): ...


class SiLU(Curve, of=nn.SiLU, function=functional.silu): ...


class Softmax(QuantizedModule):
    """Softmax along an axis."""

    _FLOAT_MODULE: ClassVar[Any] = nn.Softmax

    def __init__(self, dim: int | None = None, scale: float = 1.0, zero_point: int = 0) -> None:
        super().__init__()
        self.dim, self.scale, self.zero_point = dim, float(scale), int(zero_point)

    def forward(self, input: Tensor) -> QuantizedTensor:  # noqa: A002
        numbers = self.quantized_input(input).dequantize()
        return quantize_per_tensor(functional.softmax(numbers, self.dim), *self.grid, self.out_dtype)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        made = cls(mod.dim)
        made.put_on_grid(getattr(mod, "activation_post_process", None))
        return made

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> Self:
        return cls(mod.dim, scale, zero_point)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, {self.grid_text()}"


class PReLU(QuantizedModule):
    """ReLU with a slope below zero, of which there may be one for each channel; slopes are quantized too."""

    held: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point")
    _FLOAT_MODULE: ClassVar[Any] = nn.PReLU

    def __init__(self, output_scale: float = 1.0, output_zero_point: int = 0, num_parameters: int = 1) -> None:
        super().__init__()
        self.num_parameters = num_parameters
        self.scale, self.zero_point = float(output_scale), int(output_zero_point)
        self.set_weight(QuantizedTensor(torch.zeros(num_parameters, dtype=torch.uint8), 1.0, 0))

    def set_weight(self, w: QuantizedTensor) -> None:
        for name, part in zip(self.held, w.parts().values(), strict=True):
            self.hold(name, part)

    @property
    def weight(self) -> QuantizedTensor:
        levels, scale, zero_point = (self.tensor(name) for name in self.held)
        return QuantizedTensor(levels, float(scale), int(zero_point))

    def forward(self, input: Tensor) -> QuantizedTensor:  # noqa: A002
        numbers = self.quantized_input(input).dequantize()
        made = functional.prelu(numbers, self.weight.dequantize())
        return quantize_per_tensor(made, *self.grid, self.out_dtype)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        made = cls.from_reference(mod, 1.0, 0)
        made.put_on_grid(getattr(mod, "activation_post_process", None))
        return made

    @classmethod
    def from_reference(cls, mod: Any, scale: float, zero_point: int) -> Self:
        made = cls(scale, zero_point, mod.num_parameters)
        observer = mod.qconfig.weight()
        if observer.qscheme in PER_CHANNEL:  # of a slope for each channel one scale a slope would be left
            from quantc.nn.observers import MinMaxObserver

            observer = MinMaxObserver(dtype=torch.quint8)
        observer(mod.weight.detach().float().reshape(-1))
        made.set_weight(check_quantized(quantize_weight(mod.weight, observer), "PReLU"))
        return made

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}, {self.grid_text()}"


__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "Hardswish",
    "LeakyReLU",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
]
