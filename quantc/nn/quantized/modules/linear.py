"""The quantized linear layer, and where quantized tensors begin and end."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor, check_quantized, quantize_per_tensor
from quantc.nn.weighted import Weighted


class _Linear(Weighted):
    """A matrix product with the rows of the weight."""

    settings: ClassVar[tuple[str, ...]] = ("in_features", "out_features")
    in_features: int
    out_features: int

    def __init__(
        self, in_features: int, out_features: int, bias_: bool = True, dtype: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, kwargs.pop("bias", bias_))

    @classmethod
    def _like(cls, source: Any, has_bias: bool) -> Self:
        return cls(source.in_features, source.out_features, has_bias)

    def extra_repr(self) -> str:
        without = "" if self.bias() is not None else ", bias=False"
        shape = f"in_features={self.in_features}, out_features={self.out_features}{without}"
        return f"{shape}, {self.grid_text()}, qscheme={self.weight().qscheme()}"


class Linear(_Linear, of=nn.Linear): ...


class Quantize(QuantizedModule):
    """A float tensor rounded onto a grid."""

    _FLOAT_MODULE: ClassVar[Any] = None

    def __init__(
        self, scale: Any, zero_point: Any, dtype: torch.dtype = torch.quint8, factory_kwargs: Any = None
    ) -> None:
        from quantc.flows.dtypes import PLAIN

        super().__init__()
        self.scale, self.zero_point = float(scale), int(zero_point)
        self.out_dtype = PLAIN.get(dtype, dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.out_dtype

    def forward(self, x: Tensor) -> QuantizedTensor:
        return quantize_per_tensor(x, self.scale, self.zero_point, self.out_dtype)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        made = cls(1.0, 0)
        made.put_on_grid(getattr(mod, "activation_post_process", None))
        return made

    def extra_repr(self) -> str:
        return f"{self.grid_text()}, dtype={self.out_dtype}" if self.out_dtype is torch.uint8 else self.grid_text()

    def _get_name(self) -> str:
        return "Quantize"


class DeQuantize(nn.Module):
    """The numbers of a quantized tensor, as float32."""

    def forward(self, x: Tensor) -> Tensor:
        return check_quantized(x, "DeQuantize").dequantize()

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        return cls()


__all__ = ["DeQuantize", "Linear", "Quantize"]
