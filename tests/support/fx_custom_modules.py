"""A module that cannot be traced, and its observed and quantized versions, as users of custom modules write them."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

import quantc as qc


class FP32NonTraceable(nn.Module):
    """A linear layer behind a branch that depends on the data."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y if float(x.detach().sum()) > 0 else -y


class ObservedNonTraceable(nn.Module):
    """The same in calibration: it counts what it sees."""

    qconfig: Any

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.linear(x)
        return y if float(x.detach().sum()) > 0 else -y

    @classmethod
    def from_float(cls, float_module: FP32NonTraceable) -> Self:
        assert hasattr(float_module, "qconfig")
        observed = cls(float_module.linear)
        observed.qconfig = float_module.qconfig
        return observed


class StaticQuantNonTraceable(nn.Module):
    """The same on quantized tensors: it is given them, and gives them."""

    def __init__(self, weight: Tensor, bias: Tensor, scale: float, zero_point: int) -> None:
        super().__init__()
        self.scale, self.zero_point = scale, zero_point
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.given: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Any:
        self.given.append(x.dtype)
        x = x.dequantize()
        y = nn.functional.linear(x, self.get_buffer("weight"), self.get_buffer("bias"))
        y = y if float(x.sum()) > 0 else -y
        return torch.quantize_per_tensor(y, self.scale, self.zero_point, torch.quint8)

    @classmethod
    def from_observed(cls, observed_module: ObservedNonTraceable) -> Self:
        assert hasattr(observed_module, "qconfig")
        assert hasattr(observed_module, "activation_post_process")
        observer: Any = observed_module.activation_post_process
        scale, zero_point = observer.calculate_qparams()
        weight_observer = observed_module.qconfig.weight()
        weight_observer(observed_module.linear.weight)
        steps, _ = weight_observer.calculate_qparams()
        steps = steps.reshape(-1, 1)
        weight = (observed_module.linear.weight.detach() / steps).round().clamp(-128, 127) * steps
        return cls(weight, observed_module.linear.bias.detach(), float(scale), int(zero_point))


class DynamicQuantNonTraceable(nn.Module):
    """The same with scales found as it runs."""

    def __init__(self, fast: nn.Module) -> None:
        super().__init__()
        self.fast = fast

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.fast(x)
        return y if float(x.detach().sum()) > 0 else -y

    @classmethod
    def from_observed(cls, float_module: FP32NonTraceable) -> Self:
        x = torch.randn(2, float_module.linear.in_features)
        sizes = {"input": {0: torch.export.Dim.AUTO}}
        program = qc.capture(float_module.linear, (x,), "fx", dynamic_shapes=sizes)
        return cls(qc.lower(qc.quantize(program, None, mode="dynamic").program, "x86"))


class WeightOnlyQuantNonTraceable(nn.Module):
    """The same with the weight alone in bytes."""

    def __init__(self, levels: Tensor, steps: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("levels", levels)
        self.register_buffer("steps", steps)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Any:
        weight = self.get_buffer("levels").float() * self.get_buffer("steps")
        y = nn.functional.linear(x, weight, self.get_buffer("bias"))
        return y if float(x.detach().sum()) > 0 else -y

    @classmethod
    def from_observed(cls, float_module: FP32NonTraceable) -> Self:
        weight = float_module.linear.weight.detach()
        steps = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / steps).round().to(torch.int8), steps, float_module.linear.bias.detach())


class M(nn.Module):
    """Traceable code, then a module that is not, then traceable code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.non_traceable_submodule = FP32NonTraceable()

    def forward(self, x: Tensor) -> Any:
        x = nn.functional.relu(self.first(x))
        x = self.non_traceable_submodule(x)
        return self.last(x)


def worst_error(quantized: nn.Module, model: nn.Module, batches: list[Tensor]) -> float:
    """The largest error, as a part of the largest result."""
    with torch.no_grad():
        pairs = [(quantized(x), model(x)) for x in batches]
    return max(float((y - z).abs().max() / z.abs().max()) for y, z in pairs)
