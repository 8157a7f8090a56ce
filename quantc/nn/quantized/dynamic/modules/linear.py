"""The dynamically quantized linear layer."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.errors import SpecError
from quantc.nn.dynamic_module import RunTime, run_time_grid, source_of, store_weight, weight_observers
from quantc.nn.kernel_ops import Run, engine_number, on_kernel, target
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.torch_tensors import HALF, from_torch_tensor
from quantc.nn.weighted_module import has_relu
from quantc.targets.kernels.dynamic_linear import OnOwnScale, Weight
from quantc.targets.kernels.dynamic_quantization import RunTimeGrid


class Linear(RunTime):
    held: tuple[str, ...] = ("weight", "weight_scale", "bias")
    _FLOAT_MODULE: ClassVar[Any] = nn.Linear

    def __init__(
        self, in_features: int, out_features: int, bias_: bool = True, dtype: torch.dtype = torch.qint8, **kwargs: Any
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        zeros = torch.zeros(out_features, in_features)
        weight = zeros.to(HALF) if dtype is HALF else QuantizedTensor(zeros.to(torch.int8), 1.0, 0)
        self.set_weight_bias(weight, torch.zeros(out_features) if kwargs.get("bias", bias_) else None)
        self.training = False

    def set_weight_bias(self, w: QuantizedTensor | Tensor, b: Tensor | None) -> None:
        self.hold_weight("weight", w)
        self.hold("bias", None if b is None else b.detach().to(torch.float32).clone())

    def weight(self) -> QuantizedTensor | Tensor:
        return self.held_weight("weight")

    def bias(self) -> Tensor | None:
        return self._buffers["bias"]

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return self.forward(self.float_input(x).to(torch.float32)).to(x.dtype)
        engine = engine_number()
        run = self.kernels.get(engine) or self.kernels.made(engine, lambda: self._kernel(target(), x))
        made: Tensor = run(x)
        return made.relu_() if self.relu else made

    def _kernel(self, kind: str, x: Tensor) -> Run:
        weight = self.weight()
        if not isinstance(weight, QuantizedTensor):
            return self.half_product("weight", "bias")
        grid = run_time_grid(kind)
        if kind == "x86":
            stored = Weight(weight.data_of, self.tensor("weight_scale"), self.bias())
            return OnOwnScale(stored, RunTimeGrid(grid["qmax"], None, grid["eps"])).forward
        arguments = {
            "w": weight.data_of,
            "w_zero_point": None,
            "w_scale": self.tensor("weight_scale"),
            "bias": self.bias(),
            "per_token": False,
            **grid,
            "parts": 0,
        }
        return on_kernel(kind, "linear_dynamic", [x], arguments)

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        source = source_of(mod)
        if not isinstance(source, nn.Linear) or has_relu(mod) != cls.relu:
            raise SpecError(
                f"{cls.__name__} is made of {cls._FLOAT_MODULE.__name__}, not of {type(mod).__name__}",
                where=f"{cls.__name__}.from_float",
            )
        observers = weight_observers(mod if getattr(source, "qconfig", None) is None else source)
        made = cls(source.in_features, source.out_features, source.bias is not None)
        made.set_weight_bias(store_weight(source.weight, observers, cls.__name__), source.bias)
        return made

    @classmethod
    def from_reference(cls, ref: Any) -> Self:
        made = cls(ref.in_features, ref.out_features, ref.bias is not None)
        given = ref.get_quantized_weight()
        made.set_weight_bias(from_torch_tensor(given) if given.is_quantized else given, ref.bias)
        return made

    def extra_repr(self) -> str:
        weight = self.weight()
        kind = f", qscheme={weight.qscheme()}" if isinstance(weight, QuantizedTensor) else ""
        without = "" if self.bias() is not None else ", bias=False"
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={weight.dtype}{kind}{without}"


__all__ = ["Linear"]
