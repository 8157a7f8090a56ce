"""The quantized linear layer, and where quantized tensors begin and end."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.ir.finite_inputs import not_finite
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor, check_quantized, quantize_per_tensor
from quantc.nn.scripting import refuse_script, refuse_trace
from quantc.nn.weighted_module import Weighted
from quantc.support.finite_tensors import why_not_finite


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
    """A float tensor rounded onto a grid. Scale and zero point are buffers of one element, as torch has them."""

    scale: Tensor  # type: ignore[assignment]
    zero_point: Tensor  # type: ignore[assignment]
    _FLOAT_MODULE: ClassVar[Any] = None
    place: str = ""
    """Its path in the model that was converted."""

    def __init__(
        self, scale: Any, zero_point: Any, dtype: torch.dtype = torch.quint8, factory_kwargs: Any = None
    ) -> None:
        from quantc.spec.torch_dtypes import PLAIN

        super().__init__()
        del self.scale, self.zero_point  # the numbers of other modules
        self.set_grid(float(scale), int(zero_point))
        self.out_dtype = PLAIN.get(dtype, dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.out_dtype

    @property
    def grid(self) -> tuple[float, int]:
        return float(self.scale), int(self.zero_point)

    def set_grid(self, scale: float, zero_point: int) -> None:
        self._buffers["scale"] = torch.tensor([scale], dtype=torch.float32)
        self._buffers["zero_point"] = torch.tensor([zero_point], dtype=torch.long)

    def forward(self, x: Tensor) -> QuantizedTensor:
        if not torch.compiler.is_compiling() and (why := why_not_finite(x)) is not None:
            raise not_finite(f"what {self.place or 'a Quantize module'} is given", why)
        return quantize_per_tensor(x, *self.grid, self.out_dtype)

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

    __prepare_scriptable__ = refuse_script
    _slow_forward = refuse_trace

    def forward(self, x: Tensor) -> Tensor:
        return check_quantized(x, "DeQuantize").dequantize()

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        return cls()


__all__ = ["DeQuantize", "Linear", "Quantize"]
